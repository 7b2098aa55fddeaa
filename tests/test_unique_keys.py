"""What makes two jobs the same: the normal form of unique keys, and what of them is refused."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq import Unique
from jobq._json.members import member_names
from jobq._kinds.unique import canonical, unique_key
from tests.support.unique import (
    HOUR,
    key_of,
    name_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg


@dataclass(frozen=True)
class Order:
    customer_id: int
    note: str = ""


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


# -- what makes two jobs the same --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "form"),
    [
        ('{ "b" : 1.0, "a" : [1e2, -0.0, 1.50, 0.1e-3] }', '{"a":[100,0,1.5,0.0001],"b":1}'),
        ("12345678901234567890123", "12345678901234567890123"),
        ("1e22", "1" + "0" * 22),
        ("-2.5e1", "-25"),
        ('"e\u0301\\n\\u001f\\"\\\\/\u007f"', '"\u00e9\\n\\u001f\\"\\\\/\u007f"'),
        ('[true, false, null, {}, [], ""]', '[true,false,null,{},[],""]'),
        ('{"\u00e9": 1, "e\u0301": 2, "z": 3, "B": 4}', '{"B":4,"z":3,"\u00e9":1,"\u00e9":2}'),
        ('{"e\u0301": 2, "\u00e9": 1}', '{"\u00e9":1,"\u00e9":2}'),
    ],
)
def test_a_document_has_one_canonical_form(document: str, form: str) -> None:
    assert canonical(document) == form


SCALARS: Final = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS: Final = st.recursive(
    SCALARS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(DOCUMENTS)
def test_the_canonical_form_is_a_document_of_the_same_value_and_its_own_canonical_form(value: object) -> None:
    form = canonical(msgspec.json.encode(value).decode())
    assert canonical(form) == form
    assert canonical(msgspec.json.format(form)) == form


def test_the_documented_recipe_makes_the_same_key() -> None:
    """What docs/unique.md tells other programs, done by hand."""
    form = '{"args":{"customer_id":7},"kind":"reindex","queue":"slow"}'
    by_hand = hashlib.sha256(b"\0" + form.encode()).digest()[:16]
    unique = Unique(by_args=["customer_id"], by_queue=True)
    assert key_of("reindex", {"customer_id": 7.0, "x": 1}, unique, queue="slow") == by_hand
    form = '{"key":"caf\u00e9","queue":"slow"}'
    by_hand = hashlib.sha256(b"\0" + form.encode()).digest()[:16]
    assert key_of("k", {}, Unique("cafe\u0301", by_queue=True), queue="slow") == by_hand
    assert key_of("k", {}, Unique("cafe\u0301")) == unique_key("caf\u00e9")


def test_s49_the_same_verdict_in_either_order_whatever_the_spelling() -> None:
    all_args, by_id = Unique(by_args=True), Unique(by_args=["id"])
    assert key_of("k", {"id": 1}, all_args) != key_of("k", {"id": 1, "extra": 2}, all_args)
    assert key_of("k", {"id": 1}, by_id) == key_of("k", {"id": 1, "extra": 2}, by_id)
    same = [
        ({"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 2, "x": 1}, "a": 1}),
        ({"n": 1}, {"n": 1.0}),
        ({"n": 10**20}, {"n": 1e20}),
        ({"n": 0}, {"n": -0.0}),
        ({"s": "é"}, {"s": "e\u0301"}),
        ({"é": 1}, {"e\u0301": 1}),
    ]
    for one, other in same:
        assert key_of("k", one, all_args) == key_of("k", other, all_args), (one, other)
    different: list[tuple[object, object]] = [
        ({"n": 1}, {"n": True}),
        ({"n": 1}, {"n": "1"}),
        ({"n": None}, {}),
        ({"n": [1, 2]}, {"n": [2, 1]}),
        ({"n": 2**53}, {"n": 2**53 + 1}),
        ({"n": 0.1}, {"n": 0.10000000000000002}),
        ({"s": "a"}, {"s": "A"}),
        ({}, None),
        ([], {}),
    ]
    for one, other in different:
        assert key_of("k", one, all_args) != key_of("k", other, all_args), (one, other)


def test_s49_a_key_of_ten_kilobytes_has_a_hash_of_fixed_size_and_a_name_that_is_cut(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    args = {"text": "ü" * 5_000}
    kinds = {
        "all": Unique(by_args=True),
        "some": Unique(by_args=["text"]),
        "own": Unique("x" * 10_000, by_queue=True),
    }
    for kind, unique in kinds.items():
        first = client.enqueue(kind, args, unique=unique)
        assert client.enqueue(kind, args, unique=unique) == jobq.Enqueued(first.id, inserted=False)
        if unique.key is None:
            assert client.enqueue(kind, {"text": "ü" * 5_000 + "."}, unique=unique).inserted
        name = client.get(first.id).unique_key
        assert name is not None
        assert len(name) <= 200
    sizes = db.execute("select distinct octet_length(key) from jobq.unique_key").fetchall()
    assert sizes == [(16,)]


def test_the_name_that_people_read_says_what_the_key_was_made_of() -> None:
    assert name_of("reindex", {"b": 1.0, "a": "é"}, Unique(by_args=True)) == 'reindex {"a":"é","b":1}'
    assert name_of("reindex", {"b": 1, "a": 2}, Unique(by_args=["b"])) == 'reindex {"b":1}'
    assert name_of("k", {}, Unique("invoice-42", by_queue=True), queue="mail") == "invoice-42 @mail"
    assert name_of("k", {}, Unique("x" * 500, by_queue=True), queue="mail") == "x" * 194 + " @mail"


def test_own_keys_and_computed_ones_live_in_namespaces_of_their_own() -> None:
    computed = name_of("k", {"a": 1}, Unique(by_args=True))
    assert computed is not None
    own = [computed, '{"args":{"a":1},"kind":"k"}', '\x01{"args":{"a":1},"kind":"k"}']
    keys = {key_of("k", {"a": 1}, Unique(by_args=True)), *(unique_key(text) for text in own)}
    assert len(keys) == 1 + len(own)


def test_kind_and_queue_belong_to_a_computed_key_and_only_the_queue_can_to_ones_own() -> None:
    by_args, own = Unique(by_args=True), Unique("x")
    assert key_of("a", {}, by_args) != key_of("b", {}, by_args)
    assert key_of("a", {}, own) == key_of("b", {}, own)
    assert key_of("a", {}, by_args, queue="x") == key_of("a", {}, by_args, queue="y")
    for unique in (Unique(by_args=True, by_queue=True), Unique("x", by_queue=True)):
        assert key_of("a", {}, unique, queue="x") != key_of("a", {}, unique, queue="y")
    assert key_of("a", {"n": 1}, Unique(by_args=[])) == key_of("a", {"n": 2}, Unique(by_args=[]))


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({}, "give one of them"),
        ({"key": "a", "by_args": True}, "give one of them"),
        ({"key": "a", "by_args": ["b"]}, "by_args"),
        ({"key": ""}, "key"),
        ({"key": "a\0"}, "NUL"),
        ({"key": "\udc00"}, "surrogate"),
        ({"key": 5}, "key"),
        ({"by_args": "customer_id"}, "by_args"),
        ({"by_args": [1]}, "by_args"),
        ({"by_args": ["a", "a"]}, "twice"),
        ({"by_args": 1}, "by_args"),
        ({"key": "a", "by_queue": 1}, "by_queue"),
        ({"key": "a", "period": timedelta(0)}, "period"),
        ({"key": "a", "period": timedelta(milliseconds=999)}, "period"),
        ({"key": "a", "period": timedelta(days=36_526)}, "period"),
        ({"key": "a", "period": 60}, "period"),
        ({"key": "a", "period": HOUR, "until": "started"}, "until"),
        ({"key": "a", "until": "done"}, "until"),
        ({"key": "a", "until": []}, "until"),
        ({"key": "a", "on_conflict": "ignore"}, "on_conflict"),
        ({"key": "a", "replace": ["args"]}, "replace"),
        ({"key": "a", "on_conflict": "replace", "replace": []}, "replace"),
        ({"key": "a", "on_conflict": "replace", "replace": "args"}, "replace"),
        ({"key": "a", "on_conflict": "replace", "replace": ["queue"]}, "replace"),
        ({"key": "a", "on_conflict": "replace", "replace": ["args", "args"]}, "replace"),
        ({"key": "a", "max_wait": HOUR}, "max_wait"),
        ({"key": "a", "on_conflict": "replace", "max_wait": timedelta(0)}, "max_wait"),
        ({"key": "a", "on_conflict": "replace", "max_wait": 5}, "max_wait"),
        ({"key": "a", "on_conflict": "replace", "replace": ["args"], "max_wait": HOUR}, "max_wait"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_said(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(jobq.ConfigError, match=message):
        Unique(**given_)


class Typed(TypedDict, total=False):
    customer_id: int


class Renamed(msgspec.Struct, rename="camel"):
    customer_id: int


class Tagged(msgspec.Struct, tag="t", tag_field="type"):
    customer_id: int


class Positional(msgspec.Struct, array_like=True):
    customer_id: int


class Model(pydantic.BaseModel):
    customer_id: int
    other: int = pydantic.Field(default=0, serialization_alias="another")


class Open(pydantic.BaseModel, extra="allow"):
    customer_id: int


@pytest.mark.parametrize(
    ("args_type", "names"),
    [
        (Order, {"customer_id", "note"}),
        (Typed, {"customer_id"}),
        (Renamed, {"customerId"}),
        (Tagged, {"customer_id", "type"}),
        (Positional, set()),
        (Model, {"customer_id", "another"}),
        (Open, None),
        (Order | Typed, {"customer_id"}),
        (Order | None, {"customer_id", "note"}),
        (Annotated[Order, "x"], {"customer_id", "note"}),
        (int, set()),
        (list[int], set()),
        (None, set()),
        (dict[str, int], None),
        (Any, None),
    ],
)
def test_a_types_members_are_known_by_the_names_that_they_are_written_with(
    args_type: Any, names: set[str] | None
) -> None:
    assert member_names(args_type) == names


@pytest.mark.parametrize("args_type", [Order, Typed, Renamed, Model, int, None])
def test_a_member_that_the_type_has_not_is_refused_where_it_is_declared(args_type: Any) -> None:
    unique = Unique(by_args=["custmer_id"])
    with pytest.raises(jobq.ConfigError, match=r"by_args.*'k' has no 'custmer_id'"):
        jobq.JobType("k", args_type, unique=unique)
    jobs = jobq.Jobs()

    def handler(job: jobq.Job, args: Order) -> None: ...

    with pytest.raises(jobq.ConfigError, match="has no 'custmer_id'; there are: customer_id, note"):
        jobs.handler("k", unique=unique)(handler)


def test_a_member_that_untyped_arguments_have_not_is_refused_at_enqueue(client: jobq.Client) -> None:
    unique = Unique(by_args=["customer_id"])
    for args in ({"custmer_id": 1}, [1], None, 5):
        with pytest.raises(jobq.ConfigError, match="by_args"):
            client.enqueue("k", args, unique=unique)
        with pytest.raises(jobq.ConfigError, match=r"item 1.*by_args"):
            client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", args, unique=unique)])
    with pytest.raises(jobq.ConfigError, match="by_args"):
        client.enqueue(jobq.JobType("k", dict), {}, unique=unique)
    absent: Typed = {}
    assert client.enqueue(jobq.JobType("k", Typed, unique=unique), absent).inserted


@pytest.mark.parametrize("where", ["call", "kind", "handler", "item", "client"])
def test_a_unique_can_be_said_in_a_call_a_kind_a_handler_an_item_and_a_client(dsn: str, where: str) -> None:
    unique = Unique(by_args=["customer_id"])
    defaults: dict[str, Any] = {"unique": unique} if where == "client" else {}

    def run(job: jobq.Job, args: Order) -> None: ...

    kinds: dict[str, Any] = {
        "kind": jobq.JobType("k", Order, unique=unique),
        "handler": jobq.Jobs().handler("k", unique=unique)(run),
    }
    kind = kinds.get(where, "k")
    options: dict[str, Any] = {"unique": unique} if where in {"call", "item"} else {}
    with jobq.Client(dsn, **defaults) as client:
        if where == "item":
            made = [client.enqueue_many([jobq.NewJob(kind, Order(7, n), **options)])[0] for n in "ab"]
        else:
            made = [client.enqueue(kind, Order(7, n), **options) for n in "ab"]
        assert made == [jobq.Enqueued(made[0].id, inserted=True), jobq.Enqueued(made[0].id, inserted=False)]
        assert client.enqueue(kind, Order(7), unique=None).inserted, "the call's own word counts"
