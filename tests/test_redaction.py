"""Redaction: what hidden fields hold is nowhere that people look, and stays what it is for handlers."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import time
import traceback
from typing import TYPE_CHECKING, Annotated, Any, Final

import pydantic
import pytest
from click.testing import CliRunner

import jobq
from jobq._documents import read_document
from jobq._redaction import HIDDEN, Redaction, Secrets, check_fields
from jobq._statements.redaction import Redactions
from jobq._worker.describe import describe
from jobq.cli.app import app
from jobq.cli.output import document as written
from jobq.testing import drain, drain_sync
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.process_handlers import jobs as process_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import click
    from click.testing import Result

CARD: Final = "4111-1111-1111-1234"
ACCOUNT: Final = 994411220033
PASSWORD: Final = 'hunter2 "quoted" ümläut'
ARGS: Final = {"card_number": CARD, "account": {"iban": [ACCOUNT]}, "login": {"password": PASSWORD}, "n": 1}
PLANTED: Final = (CARD, str(ACCOUNT), "hunter2")


@dataclasses.dataclass(frozen=True)
class Payment:
    card_number: str
    amount: int


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


def run(dsn: str, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": dsn, "COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def read(dsn: str, *arguments: str) -> Any:
    return json.loads(run(dsn, *arguments, "--json").stdout)


def secrets(*documents: object, fields: tuple[str, ...] = ("card_number", "iban")) -> Secrets:
    return Secrets(Redaction(fields), lambda: documents)


# Names


@pytest.mark.parametrize(
    "name",
    [
        "password", "PASSWORD", "db_password", "userPassword", "passwd", "passphrase", "pwd", "secret",
        "client-secret", "clientSecret", "token", "access_token", "refreshToken", "tokens", "api_key",
        "apiKey", "APIKey", "x-api-key", "private_key", "secret_access_key", "Authorization", "auth",
        "credentials", "Set-Cookie", "a.b.token", "APIToken", "DBPassword", "AWSSecretKey", "SMTPPassword",
        "JWTSecret", "AUTHToken", "XToken", "dbpassword", "DBPASSWORD", "accesstoken", "password1",
        "password2", "token2",
    ],
)  # fmt: skip
def test_names_that_tell_what_they_hold_are_hidden_always(name: str) -> None:
    assert Redaction().hides(name)


@pytest.mark.parametrize(
    "name",
    [
        "secretary", "tokenizer", "author", "authored_at", "passenger", "key", "monkey", "id", "", "keyboard",
        "passwordless", "OAuthProvider", "auth0_user", "HTMLTokenizer", "TheAuthor", "bypass",
    ],
)  # fmt: skip
def test_names_that_only_sound_alike_are_not(name: str) -> None:
    assert not Redaction(["card_number"]).hides(name)


@pytest.mark.parametrize("name", ["card_number", "cardNumber", "Card-Number", "CARD NUMBER", "cardnumber"])
def test_a_declared_name_counts_whatever_its_spelling(name: str) -> None:
    assert Redaction(["card_number"]).hides(name)


@pytest.mark.parametrize("fields", ["card", 7, [""], ["--"], ["a", 1], ["a\0b"], ["x" * 129], [None]])
def test_what_is_no_list_of_names_is_refused_where_it_is_declared(fields: Any) -> None:
    with pytest.raises(jobq.ConfigError, match="redact"):
        jobq.JobType("k", dict, redact=fields)
    with pytest.raises(jobq.ConfigError, match="redact"):
        jobq.Jobs().handler("k", redact=fields)(lambda job, args: None)


def test_names_are_kept_as_they_were_given_once_each() -> None:
    assert check_fields(["b", "a", "b"]) == ("b", "a")


# Documents and texts


def test_a_field_is_hidden_at_any_depth_with_all_that_is_in_it() -> None:
    document = [{"a": {"iban": {"x": [1, 2]}, "b": 2}}, ["iban"], {"password": None}]
    assert Redaction(["iban"]).document(document) == [
        {"a": {"iban": HIDDEN, "b": 2}},
        ["iban"],
        {"password": HIDDEN},
    ]


@pytest.mark.parametrize("depth", [100, 900, 5_000])
def test_what_is_nested_too_deep_is_hidden_whole_if_anything_in_it_is(depth: int) -> None:
    for name, value in (("iban", CARD), ("other", 'no "iban": here')):
        text = '{"a":' * depth + json.dumps({name: value}) + "}" * depth
        document = read_document(text)
        shown = written(Redaction(["iban"]).document(document))
        assert ("here" in shown) == (name == "other")
        assert CARD not in shown + secrets(document).out_of(f"bad {value}")


def test_texts_are_shown_without_what_is_hidden_however_it_is_written() -> None:
    found = secrets(ARGS)
    for text in (PASSWORD, repr(PASSWORD), json.dumps(PASSWORD), json.dumps(PASSWORD, ensure_ascii=False)):
        assert "hunter2" not in found.out_of(f"ValueError: {text} is wrong")
    assert found.out_of(f"{CARD}, {ACCOUNT}, 1") == f"{HIDDEN}, {HIDDEN}, 1"
    assert found.out_of("") == ""


def test_short_values_and_truths_are_no_secrets_in_a_text() -> None:
    text = "True is 123"
    assert secrets({"iban": ["123", 123, True, None, ""]}).out_of(text) == text


def test_a_text_of_a_job_with_very_many_secrets_is_hidden_whole() -> None:
    assert secrets({"iban": [f"{n:05}" for n in range(5_000)]}).out_of("anything") == HIDDEN


def test_a_text_that_was_cut_in_the_middle_of_a_secret_ends_before_it() -> None:
    assert secrets(ARGS).out_of(f"card {CARD[:9]}", is_cut=True) == f"card {HIDDEN}"


def test_a_secret_that_was_cut_in_the_middle_of_a_text_is_hidden_as_well() -> None:
    assert secrets(ARGS).out_of(f"card '{CARD[:9]}… of cards…") == f"card '{HIDDEN}… of cards…"
    assert secrets(ARGS).out_of("a text… that is cut…") == "a text… that is cut…"
    told = "test_pay ... ok\n" * 1_000
    assert secrets(ARGS).out_of(told) == told
    assert secrets(ARGS).out_of(f"card {CARD[:9]} [...]") == f"card {HIDDEN} [...]"
    token = "".join(f"{n:05}" for n in range(2_000))
    assert secrets({"token": token}).out_of(f"no {token[:9_000]}… (more)") == f"no {HIDDEN}… (more)"


def test_what_a_cut_has_left_of_a_secret_is_hidden_on_both_of_its_sides() -> None:
    note = "".join(f"{n:05}-" for n in range(2_000))
    for begins, ends in ((note[:9_000], note[-9_000:]), (note[:30], note[-30:])):
        text = f"bad {begins}\n… (7 characters left out) …\n{ends} is no note"
        shown = f"bad {HIDDEN}\n… (7 characters left out) …\n{HIDDEN} is no note"
        assert secrets({"token": note}).out_of(text) == shown
    assert secrets({"token": note}).out_of(f"no {note[:30]}...{note[-30:]}'") == f"no {HIDDEN}...{HIDDEN}'"


def test_a_field_that_is_declared_after_the_failure_is_hidden_in_a_traceback_that_was_cut() -> None:
    note = "".join(f"{n:05}-" for n in range(5_000))
    failure = describe(ValueError(note), "failed", secrets({"note": note}))
    assert "00001-" in failure.traceback
    for text in (failure.message, failure.traceback):
        shown = secrets({"note": note}, fields=("note",)).out_of(text)
        assert not any(f"{n:05}-" in shown for n in range(5_000))
        assert shown.startswith((HIDDEN, f"ValueError: {HIDDEN}\n…"))


def test_a_secret_that_looks_as_if_it_were_cut_is_hidden_up_to_the_true_cut() -> None:
    dotted = "a letter... " * 20 + "and more… of it"
    found = secrets({"token": dotted})
    assert found.out_of(f"bad {dotted[:200]}… (9 more)") == f"bad {HIDDEN}… (9 more)"
    assert found.out_of(f"(9 more) …{dotted[-200:]} is bad") == f"(9 more) …{HIDDEN} is bad"


def test_secrets_that_overlap_are_hidden_as_one() -> None:
    found = secrets({"token": ["abcdefgh", "efghijkl", "gh-and-much-more"]})
    assert found.out_of("no abcdefghijkl") == f"no {HIDDEN}"
    assert found.out_of("no abcdefgh-and-mu…") == f"no {HIDDEN}…"


def test_names_in_a_hidden_object_are_hidden_unless_they_are_words() -> None:
    token = "ghp_16C7e42F292c6912E7710c838347Ae178B4a"
    found = secrets({"tokens": {token: "repo", "sk-12345": {"joe@here": 1}, "type": "x", "oauth2": 1}})
    assert found.out_of(f"no {token}, sk-12345, joe@here") == f"no {HIDDEN}, {HIDDEN}, {HIDDEN}"
    assert found.out_of("KeyError: 'type' in oauth2.py") == "KeyError: 'type' in oauth2.py"
    assert secrets({"repos": {token: "repo"}}).out_of(token) == token


def cost_s(document: object, text: str) -> float:
    """Return the CPU time that the description of a failure takes."""
    start = time.process_time()
    describe(ValueError(text), "failed", secrets(document))
    return time.process_time() - start


def test_long_secrets_of_one_beginning_cost_what_others_do() -> None:
    length = 100_000
    text = f"bad {'a' * 2 * length}"
    alike = cost_s({"password": "a" * length + "b", "token": "a" * length + "c"}, text)
    assert alike < 10 * cost_s({"password": "b" * length, "token": "c" * length}, text)


def test_no_more_of_a_text_is_searched_than_is_kept() -> None:
    tokens = {"tokens": [f"{n:0>3}" * 13 for n in range(900)]}
    assert cost_s(tokens, "0123456789" * 100_000) < 10 * cost_s(tokens, "0123456789" * 5_000)


def test_each_line_of_a_secret_is_hidden_however_it_is_indented() -> None:
    lines = [f"-----BEGIN KEY-----{n}" for n in range(3)]
    found = secrets({"password": "\n".join(lines)})
    shown = found.out_of("".join(f"    | {line}\n" for line in lines))
    assert shown == f"    | {HIDDEN}\n" * 3


def test_a_secret_is_hidden_where_it_is_written_in_ascii() -> None:
    secret = "pässwörter"
    assert secrets({"password": secret}).out_of(f"key {secret!a}") == f"key '{HIDDEN}'"


# What is shown of a job before it is stored


def test_a_new_jobs_repr_has_no_secrets() -> None:
    kind = jobq.JobType("pay", Payment, redact=["card_number"])
    shown = repr(jobq.NewJob(kind, Payment(CARD, 3), meta={"token": "abcdef"}))
    assert shown == "NewJob('pay', {'card_number': '***', 'amount': 3}, meta={'token': '***'})"
    assert repr(jobq.NewJob("k", object())) == "NewJob('k', <object>)"


class Issuer(enum.Enum):
    OURS = "ours"


@dataclasses.dataclass(frozen=True)
class Card:
    issuer: Issuer
    pin: int = 0


def test_a_refusal_of_arguments_quotes_no_secret() -> None:
    kind = jobq.JobType("k", Card, redact=["issuer"])
    with pytest.raises(jobq.ArgumentsEncodeError) as caught:
        kind.encode(Card(CARD))  # type: ignore[arg-type]
    assert CARD not in str(caught.value)
    assert caught.value.path == "$.issuer"
    assert caught.value.__cause__ is None, "a traceback would show it"
    with pytest.raises(jobq.ArgumentsDecodeError) as undecodable:
        kind.decode(json.dumps({"issuer": CARD}))
    assert CARD not in str(undecodable.value)
    with pytest.raises(jobq.ArgumentsEncodeError, match="another"):
        jobq.JobType("k", Card).encode(Card("another"))  # type: ignore[arg-type]


class Login(pydantic.BaseModel):
    token: Annotated[str, pydantic.Field(max_length=60)]


@dataclasses.dataclass(frozen=True)
class Visit:
    login: Login


def upgraded(args: dict[str, Any]) -> dict[str, Any]:
    Login.model_validate(args)
    return args


def upgraded_oddly(args: dict[str, Any]) -> dict[str, Any]:
    try:
        return upgraded(args)
    except ValueError:
        raise KeyError("no login") from None


def upgraded_badly(args: dict[str, Any]) -> dict[str, Any]:
    try:
        return upgraded(args)
    except ValueError as error:
        raise KeyError("no login") from error


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (jobq.JobType("k", Login), "should have at most 60 characters - at `$.token`"),
        (
            jobq.JobType("k", Visit),
            "Login: String should have at most 60 characters - at `$.token` - at `$.login`",
        ),
        (jobq.JobType("k", dict, upgrade=upgraded), "should have at most 60 characters - at `$.token`"),
        (jobq.JobType("k", dict, upgrade=upgraded_badly), "KeyError: 'no login'"),
    ],
    ids=["model", "within a dataclass", "of an upgrade hook", "behind one"],
)
def test_nor_does_pydantic_which_quotes_both_ends_of_its_input(kind: jobq.JobType[Any], said: str) -> None:
    token = "".join(f"{n:05}" for n in range(20))
    args = {"login": {"token": token}} if kind.args_type is Visit else {"token": token}
    with pytest.raises(jobq.ArgumentsDecodeError) as caught:
        kind.decode(json.dumps(args))
    assert said in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert token[:8] not in shown
    assert token[-8:] not in shown


def test_a_cause_that_is_not_pydantics_is_kept() -> None:
    with pytest.raises(jobq.ArgumentsDecodeError) as caught:
        jobq.JobType("k", dict, upgrade=upgraded_oddly).decode('{"n": 1}')
    assert isinstance(caught.value.__cause__, KeyError)


def test_nor_does_what_an_upgrade_hook_says_however_long_the_secret_is() -> None:
    token = "".join(f"{n:05}" for n in range(400))

    def upgrade(args: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"cannot upgrade {args}")

    kind = jobq.JobType("k", dict[str, Any], upgrade=upgrade)
    with pytest.raises(jobq.ArgumentsDecodeError) as caught:
        kind.decode(json.dumps({"token": token, "n": "1" * 5_000}))
    assert token[:8] not in str(caught.value)
    assert str(caught.value).endswith("1…")
    assert len(str(caught.value)) < 3_000


def test_a_computed_key_is_readable_without_secrets(client: jobq.Client) -> None:
    kind = jobq.JobType("pay", Payment, redact=["card_number"], unique=jobq.Unique(by_args=True))
    made = client.enqueue(kind, Payment(CARD, 3))
    assert client.get(made.id).unique_key == 'pay {"amount":3,"card_number":"***"}'
    assert client.enqueue(kind, Payment(CARD, 3)) == jobq.Enqueued(made.id, inserted=False)
    assert client.enqueue(kind, Payment("another", 3)).inserted


# What a worker says


def failing_jobs(got: list[Any]) -> jobq.Jobs:
    jobs = jobq.Jobs()

    @jobs.handler("pay", redact=["card_number"], max_attempts=1, aliases=["pay-old"])
    async def pay(job: jobq.Job, args: dict[str, Any]) -> None:
        got.append(args)
        if args["do"] == "cancel":
            raise jobq.Cancel(f"stolen: {args['card_number']}")
        if args["do"] == "permanent":
            raise jobq.Permanent(f"unknown: {args['card_number']}")
        raise ValueError(f"cannot charge {args['card_number']} of {job.meta['secret']}")

    return jobs


async def test_neither_log_nor_history_quotes_what_a_kind_hides(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    got: list[Any] = []
    async with working(dsn, failing_jobs(got)) as bench:
        for do in ("fail", "permanent", "cancel"):
            args = {"card_number": CARD, "do": do}
            meta = {"secret": PASSWORD}
            job_id = (await bench.client.enqueue("pay", args, meta=meta, max_attempts=1)).id
            assert (await bench.ended(job_id))["args"] == args
            assert got[-1] == args
            assert CARD not in str(await bench.client.errors(job_id))
            assert CARD not in str((await bench.client.get(job_id)).reason)
    assert f"cannot charge {HIDDEN} of {HIDDEN}" in caplog.text
    assert CARD not in caplog.text
    assert "hunter2" not in caplog.text


async def test_nor_does_a_group_of_exceptions(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    jobs = jobq.Jobs()
    secret = "\n".join(f"a line of a key: {n}" for n in range(20))

    @jobs.handler("pay", max_attempts=1)
    async def pay(job: jobq.Job, args: dict[str, Any]) -> None:
        raise ExceptionGroup("all of it failed", [ValueError(f"no key: {args['password']}")])

    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue("pay", {"password": secret}, max_attempts=1)).id
        await bench.ended(job_id)
        (error,) = await bench.client.errors(job_id)
    assert "no key" in error.traceback
    assert "a line of" not in error.message + error.traceback + caplog.text


async def test_nor_does_a_handler_in_a_process(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    async with working(dsn, process_jobs) as bench:
        args = {"password": CARD}
        job_id = (await bench.client.enqueue("quotes", args, max_attempts=1)).id
        await bench.ended(job_id, 30)
        (error,) = await bench.client.errors(job_id)
    assert error.message == f"cannot log in with {HIDDEN}"
    assert CARD not in error.traceback + caplog.text


async def test_nor_does_a_drain_in_the_users_own_tests(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        made = await client.enqueue("pay", {"card_number": CARD, "do": "fail"}, meta={"secret": PASSWORD})
        await drain(client, failing_jobs([]))
        assert CARD not in str(await client.errors(made.id))


async def test_what_kinds_declare_is_there_once_a_worker_has_started_and_stays(dsn: str) -> None:
    declared = [jobq.RedactedField("pay", "card_number"), jobq.RedactedField("pay-old", "card_number")]

    async def is_there() -> bool:
        return await bench.client.redaction.fields() == declared

    for jobs in (failing_jobs([]), failing_jobs([]), jobq.Jobs()):
        async with working(dsn, jobs) as bench:
            await eventually_async(is_there, what="the kinds' fields are there")


def test_a_handler_hides_what_its_kind_does_and_more() -> None:
    kind = jobq.JobType("pay", Payment, redact=["card_number"])
    jobs = jobq.Jobs()

    @jobs.handler(kind, redact=["amount"])
    def pay(job: jobq.Job, args: Payment) -> None:
        pass

    assert pay.redact == ("card_number", "amount")


# What jobqctl shows


def plant(client: jobq.Client) -> int:
    """Make a job, and a schedule, that say secrets in every place that there is; return the job's id."""
    jobs = jobq.Jobs()

    @jobs.handler("pay")
    def pay(job: jobq.Job, args: dict[str, Any]) -> None:
        raise ValueError(f"{args['card_number']} {args['account']['iban'][0]} {args['login']['password']!r}")

    key = f"{CARD} of {'x' * 170}{ACCOUNT}"
    meta = {"iban": ACCOUNT, "token": "hunter2"}
    made = client.enqueue("pay", ARGS, unique=key, meta=meta, max_attempts=1)
    drain_sync(client, jobs)
    client.periodic.add("p", kind="pay", args=ARGS, cron="0 0 1 1 *")
    assert client.get(made.id).reason
    return made.id


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        nested = getattr(command, "commands", None)
        yield from commands(command, *path, name) if nested else [(*path, name)]  # type: ignore[arg-type]


# What makes a command say all that it can, beside --json. `None`: it has no such option, and shows no jobs.
SAY: Final[dict[tuple[str, ...], tuple[str, ...] | None]] = {
    ("bench",): None,
    ("cancel",): ("--kind", "pay", "--yes"),
    ("completion",): None,
    ("delete",): ("--kind", "another", "--yes"),
    ("demo",): None,
    ("doctor",): (),
    ("enqueue",): ("pay", json.dumps(ARGS), "--unique", "k"),
    ("list",): (),
    ("log",): (),
    ("migrate",): None,
    ("move",): ("--kind", "pay", "--to-queue", "q", "--yes"),
    ("pause",): None,
    ("pauses",): (),
    ("periodic", "list"): (),
    ("periodic", "pause"): None,
    ("periodic", "remove"): None,
    ("periodic", "resume"): None,
    ("periodic", "trigger"): ("p",),
    ("redact",): (),
    ("reschedule",): ("--kind", "pay", "--delay", "1h", "--yes"),
    ("resume",): None,
    ("retention",): (),
    ("retry",): ("--kind", "pay", "--yes"),
    ("show",): ("1",),
    ("stats",): (),
    ("worker",): None,
    ("workers",): (),
}


def test_every_command_is_asked_for_secrets() -> None:
    assert set(SAY) == set(commands(app))


@pytest.mark.parametrize("command", [command for command, say in SAY.items() if say is not None])
def test_no_command_shows_what_is_hidden(dsn: str, client: jobq.Client, command: tuple[str, ...]) -> None:
    assert plant(client) == 1
    client.redaction.add("card_number", kind="pay")
    client.redaction.add("iban")
    for option in ([], ["--json"]):
        arguments = [*command, *(SAY[command] or ()), *option]
        result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": dsn, "COLUMNS": "1000"})
        assert result.exit_code in {0, 1}, result.output
        for planted in (*PLANTED, str(ACCOUNT)[:6]):
            assert planted not in result.output


def test_a_failed_and_a_completed_job_are_shown_with_their_gaps(dsn: str, client: jobq.Client) -> None:
    job_id = plant(client)
    client.redaction.add("card_number", "iban")
    shown = read(dsn, "show", str(job_id))
    assert shown["job"]["args"] == {
        "card_number": HIDDEN,
        "account": {"iban": HIDDEN},
        "login": {"password": HIDDEN},
        "n": 1,
    }
    assert shown["job"]["meta"] == {"iban": HIDDEN, "token": HIDDEN}
    assert shown["errors"][0]["message"] == f"{HIDDEN} {HIDDEN} '{HIDDEN}'"
    client.retry(job_id)
    jobs = jobq.Jobs()
    jobs.handler("pay", store_result=True)(lambda job, args: {"card_number": CARD, "ok": True})
    drain_sync(client, jobs)
    assert read(dsn, "show", str(job_id))["job"]["result"] == {"card_number": HIDDEN, "ok": True}


@pytest.mark.parametrize("command", [("show", "1"), ("list",), ("periodic", "list")])
def test_secrets_are_shown_to_whoever_asks_for_them(
    dsn: str, client: jobq.Client, command: tuple[str, ...]
) -> None:
    plant(client)
    client.redaction.add("card_number")
    assert CARD in run(dsn, *command, "--show-secrets", "--json").output


def test_redact_says_and_logs_what_it_does(dsn: str, client: jobq.Client) -> None:
    assert "such as password" in run(dsn, "redact").output
    assert (
        "'iban' of all jobs is hidden" in run(dsn, "redact", "iban", "--reason", "audit", "--by", "me").output
    )
    assert "was hidden already" in run(dsn, "redact", "iban").output
    assert "'pin' of jobs of kind 'pay' is hidden" in run(dsn, "redact", "pin", "--kind", "pay").output
    assert read(dsn, "redact") == [{"kind": None, "field": "iban"}, {"kind": "pay", "field": "pin"}]
    assert "pay" in run(dsn, "redact").output
    assert "is hidden no longer" in run(dsn, "redact", "iban", "--remove").output
    assert "was not hidden" in run(dsn, "redact", "iban", "--remove").output
    assert "Give their names" in run(dsn, "redact", "--remove", code=2).output
    assert [(one.action, one.target, one.reason, one.actor) for one in client.operator_log()][1:] == [
        ("redact", {"fields": ["pin"], "kind": "pay"}, None, client.operator_log()[1].actor),
        ("redact", {"fields": ["iban"]}, "audit", "me"),
    ]


def test_one_kinds_fields_are_anothers_own_business(client: jobq.Client) -> None:
    redactions = Redactions([jobq.RedactedField("a", "x"), jobq.RedactedField(None, "y")])
    for kind, expected in (("a", {"x": HIDDEN, "y": HIDDEN, "z": 1}), ("b", {"x": 1, "y": HIDDEN, "z": 1})):
        made = client.enqueue(kind, {"x": 1, "y": 1, "z": 1})
        assert redactions.job(client.get(made.id)).args == expected


async def test_both_clients_hide_and_show(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        assert await client.redaction.add("a", "b", kind="k") == ["a", "b"]
        assert await client.redaction.remove("b", "c", kind="k") == ["b"]
        assert await client.redaction.fields() == [jobq.RedactedField("k", "a")]
        made = await client.enqueue("k", {"a": 1})
        assert (await client.redaction.load()).job(await client.get(made.id)).args == {"a": HIDDEN}
        with pytest.raises(jobq.ConfigError, match="name of a field"):
            await client.redaction.add()
