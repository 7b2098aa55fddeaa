"""Declaring kinds and handlers: what is taken from a function, what is refused, who is found."""

from __future__ import annotations

import functools
import inspect
import math
import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

import msgspec
import pydantic
import pytest

from jobq._errors import ArgumentsDecodeError, ArgumentsEncodeError, ConfigError, DuplicateKind, Error
from jobq._kinds.backoff import DEFAULT_BACKOFF, ConstantBackoff
from jobq._kinds.jobs import Handler, Jobs
from jobq._kinds.jobtype import JobType, NewJob, prepare, prepare_many
from jobq._kinds.options import DEFAULTS
from jobq._kinds.unique import Unique
from jobq._types import AttemptError, Job
from tests.support.process_handlers import in_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._json.arguments import ArgumentsDecoder as OnlyForCheckers

pytestmark = pytest.mark.matrix  # json, dataclasses and annotations change with Python


@dataclass(frozen=True)
class EmailArgs:
    to: str


@dataclass(frozen=True)
class LongEmailArgs(EmailArgs):
    body: str = ""


@dataclass(frozen=True)
class OtherArgs:
    to: str


class DictArgs(TypedDict):
    to: str


class StructArgs(msgspec.Struct):
    to: str


class ModelArgs(pydantic.BaseModel):
    to: str


def make_job(kind: str = "k") -> Job:
    return Job(1, kind, "default", 0, 1, 0, 0, 25, None, 1, 0.0, None, None)


def crunch(job: Job, args: EmailArgs) -> int:
    return len(args.to)


class Pipeline:
    """Holds handlers that are not plain functions."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def step(self, job: Job, args: EmailArgs) -> None:
        self.seen.append(args.to)

    def __call__(self, job: Job, args: EmailArgs) -> None:
        self.seen.append(args.to)


class AsyncPipeline:
    async def __call__(self, job: Job, args: EmailArgs) -> None: ...


class TestHandler:
    async def test_a_decorated_async_function_is_still_callable_and_is_a_job_type(self) -> None:
        jobs = Jobs()

        @jobs.handler("send_email", max_attempts=10, timeout=timedelta(minutes=2))
        async def send_email(job: Job, args: EmailArgs) -> str:
            """Send one e-mail."""
            return f"{job.id} {args.to}"

        assert isinstance(send_email, JobType)
        assert await send_email(make_job(), EmailArgs("a")) == "1 a"
        assert (send_email.kind, send_email.args_type, send_email.mode) == ("send_email", EmailArgs, "async")
        assert vars(send_email)["__name__"] == "send_email"
        assert send_email.__doc__ == "Send one e-mail."
        assert list(inspect.signature(send_email).parameters) == ["job", "args"]
        assert send_email.resolved(DEFAULTS) == DEFAULTS._replace(max_attempts=10, timeout_s=120.0)
        assert jobs.lookup("send_email") is send_email

    def test_a_decorated_sync_function_runs_in_a_thread(self) -> None:
        handler = Jobs().handler("crunch")(crunch)
        assert handler.mode == "thread"
        assert handler.fn is crunch
        assert handler(make_job(), EmailArgs("abc")) == 3

    def test_a_module_level_function_may_run_in_a_process(self) -> None:
        handler = Jobs().handler("crunch", run_in="process")(crunch)
        assert handler.mode == "process"
        assert (handler.fn.__module__, handler.fn.__qualname__) == (__name__, "crunch")

    @pytest.mark.parametrize(
        ("fn", "mode"),
        [
            (Pipeline().step, "async"),
            (Pipeline(), "thread"),
            (AsyncPipeline(), "async"),
            (functools.partial(Pipeline.step, Pipeline()), "async"),
            (functools.wraps(crunch)(lambda *args: None), "thread"),
        ],
        ids=["method", "object", "async object", "partial", "wrapped"],
    )
    def test_other_callables_are_understood(self, fn: Callable[[Job, EmailArgs], Any], mode: str) -> None:
        handler = Jobs().handler("k")(fn)
        assert (handler.mode, handler.args_type) == (mode, EmailArgs)

    @pytest.mark.parametrize(
        "fn",
        [
            lambda job, args: None,
            lambda job, args=None, *, more=1: None,
            lambda *args: None,
            lambda job, *args: None,
        ],
    )
    def test_without_an_annotation_a_handler_gets_plain_values(self, fn: Callable[[Job, Any], None]) -> None:
        handler = Jobs().handler("k")(fn)
        assert handler.args_type is Any
        assert handler.decode("[1]") == [1]
        assert handler.encode({"a": 1}) == '{"a":1}'

    def test_dict_is_plain_values_too(self) -> None:
        def plain(job: Job, args: dict[str, Any]) -> None: ...

        handler = Jobs().handler("k")(plain)
        assert handler.decode('{"a": {"b": [1]}}') == {"a": {"b": [1]}}

    def test_annotations_keep_their_constraints(self) -> None:
        def few(job: Job, args: Annotated[int, msgspec.Meta(le=3)]) -> None: ...

        handler = Jobs().handler("k")(few)
        assert handler.decode("3") == 3
        with pytest.raises(ArgumentsDecodeError, match="<= 3"):
            handler.decode("4")

    def test_none_is_a_kind_without_arguments(self) -> None:
        async def tick(job: Job, args: None) -> None: ...

        handler = Jobs().handler("tick")(tick)
        assert handler.encode(None) == "null"
        assert handler.decode("null") is None

    def test_only_the_annotation_of_the_arguments_must_resolve(self) -> None:
        def works(job: OnlyForCheckers[Any], args: EmailArgs) -> OnlyForCheckers[Any]:
            raise NotImplementedError

        handler = Jobs().handler("k")(works)  # type: ignore[arg-type]
        assert handler.args_type is EmailArgs

    def test_a_type_that_is_not_there_at_run_time_is_refused_with_what_to_do(self) -> None:
        def fails(job: Job, args: OnlyForCheckers[Any]) -> None: ...

        with pytest.raises(ConfigError) as caught:
            Jobs().handler("k")(fails)
        message = str(caught.value)
        assert "annotation 'OnlyForCheckers[Any]' of 'args' does not resolve" in message
        assert '@jobs.handler(JobType("kind", TheType))' in message

    def test_a_local_type_works_when_the_job_type_says_it(self) -> None:
        @dataclass
        class Local:
            a: int

        def fn(job: Job, args: Local) -> None: ...

        with pytest.raises(ConfigError, match="does not resolve"):
            Jobs().handler("k")(fn)
        handler = Jobs().handler(JobType("k", Local))(fn)
        assert handler.decode('{"a": 1}') == Local(1)

    @pytest.mark.parametrize(
        "fn", [lambda: None, lambda job: None, lambda job, args, more: None, lambda job, *, args: None]
    )
    def test_a_function_that_does_not_take_job_and_args_is_refused(self, fn: Any) -> None:
        with pytest.raises(ConfigError, match=r"takes two positional arguments, \(job, args\)"):
            Jobs().handler("k")(fn)

    def test_generators_are_refused(self) -> None:
        def generator(job: Job, args: dict[str, Any]) -> Any:
            yield 1

        async def async_generator(job: Job, args: dict[str, Any]) -> Any:
            yield 1

        for fn in (generator, async_generator):
            with pytest.raises(ConfigError, match="a generator cannot be a handler"):
                Jobs().handler("k")(fn)

    @pytest.mark.parametrize("run_in", ["thread", "process"])
    def test_async_functions_run_on_the_loop_only(self, run_in: Any) -> None:
        async def fn(job: Job, args: dict[str, Any]) -> None: ...

        with pytest.raises(ConfigError, match=f"run_in='{run_in}': .*fn is async"):
            Jobs().handler("k", run_in=run_in)(fn)

    def test_what_another_process_could_not_find_is_refused(self) -> None:
        def local(job: Job, args: dict[str, Any]) -> None: ...

        no_module_level: list[Callable[[Job, Any], Any]] = [
            local,
            lambda job, args: None,
            Pipeline(),
            functools.partial(crunch),
            Pipeline().__call__,
        ]
        for fn in no_module_level:
            with pytest.raises(ConfigError, match="must be a function defined with `def` at module level"):
                Jobs().handler("k", run_in="process")(fn)

    def test_an_unknown_place_to_run_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="run_in='fiber': 'thread' or 'process'"):
            Jobs().handler("k", run_in="fiber")(crunch)  # type: ignore[call-overload]

    def test_a_decorator_without_its_kind_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="is it written without"):
            Jobs().handler(crunch)(crunch)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="decorates a function, not 5"):
            Jobs().handler("k")(5)  # type: ignore[arg-type]

    def test_options_of_a_declaration_are_checked_by_name(self) -> None:
        with pytest.raises(ConfigError, match="priority=11"):
            Jobs().handler("k", priority=11)(crunch)
        with pytest.raises(ConfigError, match="run_at: belongs to one job's enqueue"):
            Jobs().handler("k", run_at=datetime.now(UTC))(crunch)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="retries: no such option"):
            Jobs().handler("k", retries=3)(crunch)  # type: ignore[call-overload]

    def test_the_backoff_is_the_default_one_or_ones_own_and_always_answers(self) -> None:
        assert Jobs().handler("k")(crunch).policy is None
        random.seed(0)
        assert timedelta(seconds=0.9) <= Jobs().handler("k")(crunch).backoff(1) <= timedelta(seconds=1.1)
        minute = ConstantBackoff(timedelta(minutes=1), jitter=0)
        assert Jobs().handler("k", backoff=minute)(crunch).backoff(7) == timedelta(minutes=1)
        with pytest.raises(ConfigError, match="backoff=60: a callable"):
            Jobs().handler("k", backoff=60)(crunch)  # type: ignore[call-overload]

    def test_a_result_is_bounded_and_held_to_the_rules_of_arguments(self) -> None:
        handler = Jobs().handler("k", store_result=True)(crunch)
        assert handler.store_result
        assert not Jobs().handler("k")(crunch).store_result
        assert handler.encode_result({"n": 1}) == '{"n":1}'
        with pytest.raises(ArgumentsEncodeError, match=r"result\.n: nan"):
            handler.encode_result({"n": math.nan})
        with pytest.raises(ArgumentsEncodeError, match="may have 65,536"):
            handler.encode_result("x" * 65_536)


class TestImplementing:
    SEND_EMAIL = JobType(
        "send_email",
        EmailArgs,
        queue="mail",
        aliases=["mail"],
        backoff=ConstantBackoff(timedelta(seconds=7), jitter=0),
    )

    def test_a_handler_takes_over_what_its_job_type_declares(self) -> None:
        jobs = Jobs()

        @jobs.handler(self.SEND_EMAIL)
        async def send(job: Job, args: EmailArgs) -> None: ...

        assert (send.kind, send.args_type, send.aliases) == ("send_email", EmailArgs, ("mail",))
        assert send.resolved(DEFAULTS).queue == "mail"
        assert send.backoff(3) == timedelta(seconds=7)
        assert jobs.lookup("mail") is jobs.lookup("send_email") is send

    def test_what_concerns_the_worker_may_be_said_at_the_handler(self) -> None:
        handler = Jobs().handler(
            self.SEND_EMAIL,
            aliases=["post"],
            upgrade=lambda old: {"to": old.get("to") or old["address"]},
            backoff=ConstantBackoff(timedelta(seconds=1), jitter=0),
        )(crunch)
        assert handler.aliases == ("mail", "post")
        assert handler.decode('{"address": "a"}') == EmailArgs("a")
        assert handler.backoff(1) == timedelta(seconds=1)

    def test_what_every_enqueue_should_see_may_not(self) -> None:
        with pytest.raises(ConfigError, match=r"queue: belongs to JobType\('send_email', EmailArgs\)"):
            Jobs().handler(self.SEND_EMAIL, queue="other")(crunch)  # type: ignore[call-overload]

    def test_a_function_for_other_arguments_is_refused(self) -> None:
        def fn(job: Job, args: OtherArgs) -> None: ...

        with pytest.raises(
            ConfigError, match=r"fn takes OtherArgs and JobType\('send_email', EmailArgs\) EmailA"
        ):
            Jobs().handler(self.SEND_EMAIL)(fn)  # type: ignore[arg-type]

    @pytest.mark.parametrize("args_type", [None, type(None)])
    def test_a_kind_without_arguments_is_implemented_by_a_function_that_takes_none(
        self, args_type: None
    ) -> None:
        def fn(job: Job, args: None) -> None: ...

        handler = Jobs().handler(JobType("tick", args_type))(fn)
        assert handler.decode("{}") is None

    def test_a_function_without_annotation_implements_any_kind(self) -> None:
        def fn(job, args):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            return args

        assert Jobs().handler(self.SEND_EMAIL)(fn).args_type is EmailArgs


class TestJobs:
    def test_kinds_and_aliases_are_found_and_others_are_not(self) -> None:
        jobs = Jobs()
        new = jobs.handler("new", aliases=["old", "older"])(crunch)
        other = jobs.handler("other")(crunch)
        assert jobs.kinds == ("new", "old", "older", "other")
        assert jobs.handlers == (new, other)
        assert [jobs.lookup(kind) for kind in ("new", "old", "older", "other")] == [new, new, new, other]
        assert jobs.lookup("unknown") is None
        assert repr(jobs) == "Jobs(new, old, older, other)"

    @pytest.mark.parametrize(
        ("kind", "aliases"), [("a", []), ("b", []), ("c", ["a"]), ("c", ["d", "b"])], ids=str
    )
    def test_a_kind_declared_twice_fails_at_once(self, kind: str, aliases: list[str]) -> None:
        jobs = Jobs()
        first = jobs.handler("a", aliases=["b"])(crunch)
        with pytest.raises(DuplicateKind, match=r"is run by tests\.test_jobs\.crunch already"):
            jobs.handler(kind, aliases=aliases)(crunch)
        assert jobs.kinds == ("a", "b")
        assert jobs.lookup("a") is first

    @pytest.mark.parametrize("aliases", [["a"], ["b", "b"]])
    def test_aliases_that_repeat_are_refused(self, aliases: list[str]) -> None:
        with pytest.raises(DuplicateKind, match="repeat one another"):
            JobType("a", EmailArgs, aliases=aliases)

    def test_a_string_of_aliases_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="aliases='old': a sequence"):
            Jobs().handler("new", aliases="old")(crunch)

    def test_two_applications_know_nothing_of_each_other(self) -> None:
        first, second = Jobs(), Jobs()
        assert first.handler("a")(crunch) is not second.handler("a")(crunch)
        assert first.kinds == second.kinds == ("a",)

    def test_prepare_finds_arguments_that_cannot_be_decoded(self) -> None:
        def fn(job: Job, args: complex | list[DictArgs] | list[int]) -> None: ...

        jobs = Jobs()
        jobs.handler("good")(crunch)
        jobs.prepare()
        jobs.handler("bad")(fn)
        with pytest.raises(ConfigError, match=r"kind 'bad': arguments of type .* cannot be decoded"):
            jobs.prepare()


class TestInclude:
    def test_an_application_is_composed_of_parts(self) -> None:
        app, part = Jobs(), Jobs()
        ours, theirs = app.handler("ours")(crunch), part.handler("theirs", aliases=["old"])(crunch)
        app.include(part)
        assert app.kinds == ("ours", "theirs", "old")
        assert app.handlers == (ours, theirs)
        assert part.kinds == ("theirs", "old")

    def test_a_part_serves_several_applications(self) -> None:
        part = Jobs()
        part.handler("a")(crunch)
        for app in (Jobs(), Jobs()):
            app.include(part)
            assert app.kinds == ("a",)

    def test_a_clash_leaves_all_as_it_was(self) -> None:
        app, part = Jobs(), Jobs()
        app.handler("b")(crunch)
        part.handler("a")(crunch)
        part.handler("b")(crunch)
        with pytest.raises(DuplicateKind, match="kind 'b'"):
            app.include(part)
        assert app.kinds == ("b",)
        part.handler("c")(crunch)

    def test_a_handler_that_the_application_would_not_see_is_refused(self) -> None:
        app, part = Jobs(), Jobs()
        app.include(part)
        with pytest.raises(ConfigError, match="late: this Jobs was included in another one"):
            part.handler("late")(crunch)

    def test_including_oneself_is_refused(self) -> None:
        jobs = Jobs()
        with pytest.raises(ConfigError, match="cannot include itself"):
            jobs.include(jobs)


class TestOnDiscard:
    def test_the_handlers_own_comes_first_then_its_jobs_then_the_applications(self) -> None:
        heard: list[str] = []

        def listener(name: str) -> Callable[[Job, AttemptError], None]:
            return lambda job, error: heard.append(f"{name} {job.id} {error.type}")

        app, part, other = Jobs(), Jobs(), Jobs()
        app.on_discard(listener("app"))
        part.on_discard(listener("part"))
        other.on_discard(listener("other"))
        part.handler("a", aliases=["b"], on_discard=listener("handler"))(crunch)
        other.handler("c")(crunch)
        app.include(part)
        app.include(other)
        error = AttemptError(1, "failed", "ValueError", "no", "", "w", None, datetime.now(UTC), 0)

        def hear(jobs: Jobs, kind: str | None) -> list[str]:
            heard.clear()
            for callback in jobs.discard_callbacks(kind):
                callback(make_job(), error)
            return [line.split()[0] for line in heard]

        assert hear(app, "a") == hear(app, "b") == ["handler", "part", "app"]
        assert hear(app, "c") == ["other", "app"]
        assert hear(app, "unknown") == hear(app, None) == ["app"]
        assert hear(part, "a") == ["handler", "part"]
        assert heard == ["handler 1 ValueError", "part 1 ValueError"]

    def test_it_is_a_decorator_that_leaves_the_function_alone(self) -> None:
        jobs = Jobs()

        @jobs.on_discard
        async def tell(job: Job, error: AttemptError) -> None: ...

        assert inspect.iscoroutinefunction(tell)
        assert jobs.discard_callbacks("k") == (tell,)
        with pytest.raises(ConfigError, match="on_discard: decorates a function"):
            jobs.on_discard(5)  # type: ignore[type-var]


class TestJobType:
    @pytest.mark.parametrize(
        ("args_type", "args"),
        [
            (EmailArgs, EmailArgs("a")),
            (EmailArgs, LongEmailArgs("a")),
            (StructArgs, StructArgs("a")),
            (ModelArgs, ModelArgs(to="a")),
            (DictArgs, {"to": "a"}),
            (dict, {"to": "a"}),
            (dict[str, Any], {"to": "a"}),
            (list[int], [1]),
            (float, 1),
            (Any, {"to": "a"}),
            (None, None),
            (type(None), None),
            (EmailArgs | OtherArgs, OtherArgs("a")),
        ],
        ids=str,
    )
    def test_arguments_of_the_declared_type_are_encoded(self, args_type: Any, args: Any) -> None:
        assert JobType("k", args_type).encode(args) in (
            '{"to":"a"}',
            '{"to":"a","body":""}',
            "[1]",
            "1",
            "null",
        )

    @pytest.mark.parametrize(
        ("args_type", "args", "message"),
        [
            (EmailArgs, OtherArgs("a"), "takes EmailArgs, not OtherArgs"),
            (EmailArgs, {"to": "a"}, "takes EmailArgs, not dict"),
            (EmailArgs, None, "takes EmailArgs, not None"),
            (StructArgs, EmailArgs("a"), "takes StructArgs, not EmailArgs"),
            (ModelArgs, {"to": "a"}, "takes ModelArgs, not dict"),
            (DictArgs, EmailArgs("a"), "takes DictArgs, not EmailArgs"),
            (dict, [1], "takes dict, not list"),
            (dict[str, int], EmailArgs("a"), r"takes dict\[str, int\], not EmailArgs"),
            (float, "1", "takes float, not str"),
            (None, {}, "takes None, not dict"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_arguments_of_another_type_are_refused_before_the_database(
        self, args_type: Any, args: Any, message: str
    ) -> None:
        with pytest.raises(ArgumentsEncodeError, match=rf"\$: kind 'k' {message}"):
            JobType("k", args_type).encode(args)

    def test_it_decodes_what_it_encodes(self) -> None:
        kind = JobType("k", EmailArgs)
        kind.prepare()
        assert kind.decode(kind.encode(EmailArgs("ä"))) == EmailArgs("ä")

    def test_the_limit_of_a_client_counts(self) -> None:
        with pytest.raises(ArgumentsEncodeError, match="may have 10"):
            JobType("k", EmailArgs).encode(EmailArgs("long enough"), max_bytes=10)

    def test_a_mistake_is_refused_by_name(self) -> None:
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"queue": ""}, "queue=''"),
            ({"upgrade": 5}, "upgrade=5: a callable"),
            ({"backoff": 5}, "backoff=5: a callable"),
            ({"expires_at": datetime.now(UTC)}, "expires_at: belongs"),
        ]
        for options, message in mistakes:
            with pytest.raises(ConfigError, match=message):
                JobType("k", EmailArgs, **options)

    def test_what_it_shows(self) -> None:
        assert repr(JobType("k", EmailArgs)) == "JobType('k', EmailArgs)"
        assert repr(JobType("k", None)) == "JobType('k', None)"
        assert repr(JobType("k", dict[str, int])) == "JobType('k', dict[str, int])"
        assert repr(Jobs().handler("k")(crunch)) == "Handler('k', EmailArgs)"
        assert repr(NewJob("k", {"a": 1}, priority=2)) == "NewJob('k', {'a': 1}, priority=2)"
        assert repr(NewJob(JobType("k", EmailArgs), EmailArgs("a"))) == "NewJob('k', {'to': 'a'})"


class TestPrepare:
    KIND = JobType("send_email", EmailArgs, queue="mail", priority=2)

    def test_one_job(self) -> None:
        assert prepare(self.KIND, EmailArgs("a"), {"priority": 3}, DEFAULTS) == (
            "send_email",
            '{"to":"a"}',
            DEFAULTS._replace(queue="mail", priority=3),
        )

    def test_a_bare_string_is_the_untyped_way_and_has_the_clients_defaults(self) -> None:
        defaults = DEFAULTS._replace(queue="client")
        assert prepare("send_email", {"to": "a"}, {}, defaults) == ("send_email", '{"to":"a"}', defaults)

    def test_a_handler_is_a_kind(self) -> None:
        handler: Handler[EmailArgs, int] = Jobs().handler("k", priority=1)(crunch)
        assert prepare(handler, EmailArgs("a"), {}, DEFAULTS).options.priority == 1

    def test_many_jobs_in_their_order(self) -> None:
        jobs: list[NewJob] = [
            NewJob(self.KIND, EmailArgs("a"), unique="x"),
            NewJob("other", [1], priority=1),
        ]
        kinds, args, options = prepare_many(jobs, DEFAULTS)
        assert (kinds, args) == (("send_email", "other"), ('{"to":"a"}', "[1]"))
        assert [one.priority for one in options] == [2, 1]

    @pytest.mark.parametrize(
        "kind",
        [
            KIND,
            JobType("k", EmailArgs, unique="x"),
            JobType("k", EmailArgs, unique=Unique(by_args=True)),
            JobType("k", StructArgs),
        ],
        ids=["flat", "one key", "a key each", "not flat"],
    )
    @pytest.mark.parametrize(
        ("odd", "options"),
        [
            (EmailArgs("b"), {}),
            (EmailArgs("b"), {"queue": "other", "meta": {"a": 1}}),
            (LongEmailArgs("b", "c"), {}),
        ],
        ids=["alike", "options", "a subclass"],
    )
    def test_many_are_prepared_as_each_of_them_is(
        self, kind: JobType[Any], odd: EmailArgs, options: dict[str, Any]
    ) -> None:
        make: Any = kind.args_type
        last = odd if make is EmailArgs else StructArgs("b")
        jobs = [NewJob(kind, make(to)) for to in ("a", 'ü\n"\\', "")] + [NewJob(kind, last, **options)]
        each = [prepare(job.kind, job.args, job.options, DEFAULTS) for job in jobs]
        columns = prepare_many(jobs, DEFAULTS)
        assert list(zip(*columns, strict=True)) == each

    def test_no_jobs_are_no_rows(self) -> None:
        assert prepare_many([], DEFAULTS) == ((), (), ())

    def test_an_error_among_jobs_that_are_alike_names_the_item(self) -> None:
        jobs = [NewJob(self.KIND, EmailArgs("a")), NewJob(self.KIND, EmailArgs("a\0"))]
        with pytest.raises(ArgumentsEncodeError, match=r"^item 1: \$\.to: a NUL"):
            prepare_many(jobs, DEFAULTS)

    @pytest.mark.parametrize(
        ("culprit", "error", "message"),
        [
            (NewJob("k", {"a": math.nan}), ArgumentsEncodeError, r"^item 1: \$\.a: nan"),
            (NewJob("k", {}, meta={"a": b""}), ArgumentsEncodeError, r"^item 1: meta\.a: bytes"),
            (
                NewJob(cast("Any", KIND), OtherArgs("a")),
                ArgumentsEncodeError,
                r"^item 1: \$: kind 'send_email' takes",
            ),
            (NewJob("k", {}, priority=11), ConfigError, "^item 1: priority=11"),
            (NewJob("", {}), ConfigError, "^item 1: kind=''"),
            (("k", {}), ConfigError, "^item 1: a NewJob, not an object of tuple"),
        ],
        ids=["args", "meta", "type", "option", "kind", "tuple"],
    )
    def test_an_error_names_the_item(self, culprit: Any, error: type[Error], message: str) -> None:
        with pytest.raises(error, match=message) as caught:
            prepare_many([NewJob("k", {}), culprit], DEFAULTS)
        if isinstance(caught.value, ArgumentsEncodeError):
            assert caught.value.index == 1

    def test_a_plain_function_is_no_kind(self) -> None:
        with pytest.raises(ConfigError, match="a JobType, a handler, or a string"):
            prepare(crunch, EmailArgs("a"), {}, DEFAULTS)  # type: ignore[arg-type]


def test_the_default_policy_is_shared_and_not_changed() -> None:
    assert DEFAULT_BACKOFF.cap == timedelta(days=1)


def test_a_process_handler_that_a_new_process_would_not_find_is_refused_by_a_worker() -> None:
    handler = Jobs().handler("crunch", run_in="process")(crunch)  # and `crunch` stays the bare function
    with pytest.raises(ConfigError, match=r"test_jobs\.crunch, and finds function there"):
        handler.check_found_by_name()
    in_process.check_found_by_name()
