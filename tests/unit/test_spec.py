"""SPEC.md says what the code does: every field, code, kind and number, and nothing generated is stale."""

import re
import struct
from pathlib import Path
from typing import Protocol, get_args

import msgspec
import pytest

import generate_proto
from proto_vectors import LIMITS
from worker.config import FRAME_BYTES, HARD_FRAME_BYTES
from worker.coordinator.admin import operation_in
from worker.coordinator.lease import Lease
from worker.exit_codes import ExitCode
from worker.rank import status_file
from worker.run_files import RunFiles
from workerproto import codec, messages, operations
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body
from workerproto.fields import ArrayBody, MapBody
from workerproto.messages import ErrorCode, HeaderFlag, Kind, RefusalCode, RowFlag
from workerproto.rundir import DEFAULT_NAME, endpoint_of
from workerproto.session import Session
from workerproto.states import Gang, RemoteStateError
from workerproto.steps import Refusal
from workerproto.testing.fake_gang import FakeGang
from workerproto.validate import StepValidator

SPEC_FILE = Path(__file__).resolve().parents[2] / "proto" / "SPEC.md"
SPEC = SPEC_FILE.read_text(encoding="utf-8")
STRUCTS = [
    value
    for value in (vars(messages) | vars(operations)).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and not value.__name__.startswith("_")
    if value not in (msgspec.Struct, MapBody, ArrayBody)
]


def section(heading: str) -> str:
    """From a heading to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert found, f"SPEC.md has no section {heading!r}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, without its head."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


def test_nothing_generated_is_stale() -> None:
    assert not generate_proto.stale(generate_proto.files()), "run python scripts/generate_proto.py"


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_in_its_table_with_type_bounds_and_default(struct: type[msgspec.Struct]) -> None:
    rows = tables(section(struct.__name__))[0] if struct.__struct_fields__ else []
    assert [row[:-1] for row in rows] == generate_proto.field_cells(struct)
    assert all(row[-1] for row in rows)


def test_the_structs_are_those_of_the_bodies() -> None:
    bodies = set(messages.BODIES.values()) - {operations.Control}
    assert bodies | set(get_args(operations.Control)) <= set(STRUCTS)
    assert set(messages.BODIES) == set(Kind) - {Kind.PING, Kind.PONG}


def test_every_kind_has_its_number_its_body_and_its_sequence() -> None:
    rows = tables(section("5. Kinds"))[0]
    assert [(int(row[0]), row[1]) for row in rows] == [(int(kind), kind.name) for kind in Kind]
    for row in rows:
        kind = Kind(int(row[0]))
        body = messages.BODIES.get(kind)
        first = next(iter(get_args(body)), body)
        assert row[3] == ("none" if first is None else "array" if first.__struct_config__.array_like else "map")
        assert (row[4] == "next") == (kind in messages.ORDERED_KINDS)


def test_the_header_is_laid_out_as_the_table_says() -> None:
    rows = tables(section("3. Header"))[0]
    packed = {"bytes": "4s", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
    layout = struct.Struct("<" + "".join(packed[row[3]] for row in rows))
    values = [b"RNKD", 1, 16, 2, 3, 4, 5]
    assert layout.pack(*values) == Header(Kind.STEP, 2, 3, 4, 5).encode()
    offset = 0
    for row in rows:
        assert int(row[0]) == offset
        offset += int(row[1])
    assert offset == codec.HEADER_BYTES


@pytest.mark.parametrize(
    ("heading", "codes"), [("14. Errors: the first tier", ErrorCode), ("15. Refusals: the second tier", RefusalCode)]
)
def test_every_code_is_told(heading: str, codes: type[ErrorCode] | type[RefusalCode]) -> None:
    rows = tables(section(heading))[0]
    assert sorted(row[0].strip("`") for row in rows) == sorted(codes)


def test_every_operation_is_told_and_has_vectors() -> None:
    names = [str(kind.__struct_config__.tag) for kind in get_args(operations.Control)]
    assert [row[0].strip("`") for row in tables(section("Control"))[0]] == names
    assert [row[0].strip("`") for row in tables(section("22. Operations"))[0]] == names
    assert {vector["meaning"]["body"]["op"] for vector in generate_proto.frame_vectors()["control"]} == set(names)


def test_an_operator_may_ask_for_what_the_table_says() -> None:
    told = {row[0].strip("`"): row[2] for row in tables(section("Control"))[0]}
    least: list[operations.Control] = [
        operations.ConfigureKv(1), operations.Sleep(), operations.Wake(), operations.UpdateBegin(),
        operations.UpdateChunk("x"), operations.UpdateFinish("x"), operations.Profile(True), operations.Drain(),
    ]  # fmt: skip
    taken = {operations.name_of(one): operation_in([msgspec.json.encode(one)]) is not None for one in least}
    assert {name: "yes" if takes else "no" for name, takes in taken.items()} == told


def test_every_flag_is_told() -> None:
    def flags(heading: str, which: int) -> list[tuple[int, str]]:
        return [(int(row[0]), row[1]) for row in tables(section(heading))[which] if row[1]]

    assert flags("8. Order and credit", 0) == [(int(flag), str(flag.name)) for flag in HeaderFlag]
    assert flags("Step", 1) == [(int(flag), str(flag.name)) for flag in RowFlag]


def test_exit_codes_and_sizes_are_those_of_the_worker() -> None:
    rows = tables(section("11. Failure and epochs"))[0]
    assert [int(row[0]) for row in rows] == [int(code) for code in ExitCode]
    assert f"({FRAME_BYTES})" in section("16. Sizes")
    assert f"({HARD_FRAME_BYTES})" in section("16. Sizes")


def test_the_status_file_is_laid_out_as_the_table_says(tmp_path: Path) -> None:
    files = RunFiles("g", {"RANKD_RUN_DIR": str(tmp_path)}, "01234567", 7)
    assert files.status(3) == tmp_path / "g" / "01234567.status3"
    assert "*launch*`.status`*rank*" in section("20. Status files")
    file = tmp_path / "status"
    status_file.create_status_file(file).close()
    writer = status_file.StatusWriter(epoch=7, threads=3)
    writer.attach(file)
    writer.progress(11, 22)
    writer.begin_step(99)
    record = file.read_bytes()
    assert f"{len(record)} bytes" in section("20. Status files")
    kinds = {"u32": "<I", "f64": "<d", "u64": "<Q"}
    told = {
        row[2].split(",")[0]: struct.unpack_from(kinds[row[1]], record, int(row[0]))[0]
        for row in tables(section("20. Status files"))[0]
        if row[1] in kinds and row[2] != "0"
    }
    assert record[:4] == b"RKST"
    assert told["version"] == 1
    assert (told["epoch"], told["threads of the rank"]) == (7, 3)
    assert told["gang sequence of the oldest step under way"] == 99
    assert (told["while loading: bytes of weights done"], told["while loading: bytes of weights in all"]) == (11, 22)
    assert ", ".join(status_file.PHASES) + "." in section("20. Status files")
    assert told["phase"] == status_file.PHASES.index("step")


def test_a_coordinator_s_bye_has_one_of_the_codes_that_are_told() -> None:
    ((cell,),) = ([row[-1] for row in tables(section("Bye"))[0] if row[0] == "`code`"],)
    sources = (SPEC_FILE.parents[1] / "worker" / "coordinator").glob("*.py")
    said = {code for path in sources for code in re.findall(r'_end_lease\([\w.]+, "(\w+)"', path.read_text())}
    assert said == set(re.findall(r"`([A-Z_]+)`", cell))


def test_the_run_directory_is_the_first_of_three() -> None:
    assert f"The default name is `{DEFAULT_NAME}`." in section("2. Transport")
    everything = {"RANKD_RUN_DIR": "/run/a", "XDG_RUNTIME_DIR": "/run/b"}
    assert endpoint_of("n", everything) == "ipc:///run/a/n/sched"
    assert endpoint_of("n", everything | {"RANKD_RUN_DIR": ""}) == "ipc:///run/b/rankd/n/sched"
    assert re.fullmatch(r"ipc:///.*/rankd-\d+/n/sched", endpoint_of("n", {}))


def test_there_are_no_features_yet() -> None:
    gang, session = FakeGang(), Session()
    frame, body = session.hello("", False)
    gang.receive(b"peer", [frame, body])
    for kind, said in ((Kind.HELLO, body), (Kind.WELCOME, gang.outbox[0][2])):
        message = decode_body(kind, said)
        assert isinstance(message, messages.Hello | messages.Welcome)
        assert message.features == []


def test_ranks_look_for_no_end_of_a_sequence() -> None:
    """Only a scheduler knows that such a token has come: what judges or computes a step does not ask which it is. (The
    model's config tells it to whoever reads text.)
    """
    root, end = SPEC_FILE.parents[1], re.compile(r"\beos|end_of_(?:seq|text)|stop_token", re.IGNORECASE)
    judging = [*(root / "proto" / "workerproto").glob("*.py"), *(root / "worker").rglob("*.py")]
    assert len(judging) > 100
    assert [path.name for path in judging if end.search(path.read_text(encoding="utf-8"))] == ["model_config.py"]


# What the spec promises of answers to mistakes, whatever is in them.


def error_of(body: bytes) -> messages.Error:
    gang = FakeGang()
    gang.receive(b"peer", [Header(Kind.HELLO, 0, 0, 5).encode(), body])
    (_, header, answer), *_ = gang.outbox
    error = decode_body(decode_header(header).kind, answer)
    assert isinstance(error, messages.Error)
    return error


@pytest.mark.parametrize("name", ["x" * 100_000, "`$" + "x" * 100_000])
def test_an_error_that_echoes_stays_within_its_own_bounds(name: str) -> None:
    assert error_of(msgspec.msgpack.encode({name: 1})).code is ErrorCode.BAD_BODY


def test_a_refusal_of_a_negative_id_can_be_read() -> None:
    body = encode_body(messages.Step(finished=codec.pack([-1])))
    with pytest.raises(Refusal) as caught:
        StepValidator(LIMITS).check(1, 0, body)
    assert caught.value.request is None
    assert caught.value.value == "-1"


def test_flags_belong_to_steps_alone() -> None:
    for kind in set(Kind) - {Kind.STEP}:
        with pytest.raises(WireError) as caught:
            decode_header(Header(kind, HeaderFlag.RESYNC).encode())
        assert caught.value.code is ErrorCode.BAD_FLAGS


def test_a_scheduler_takes_nothing_of_another_lease() -> None:
    session = Session()
    session.hello("", False)
    other = Header(Kind.WELCOME, 0, 1, session.lease ^ 1).encode()
    with pytest.raises(RemoteStateError, match="lease"):
        session.receive([other, encode_body(messages.Welcome("READY", 1000))])


# One order of judgement, whoever judges.


class Judge(Protocol):
    def __call__(
        self, header: Header, *, ready: bool, full: bool, barrier: bool = False, waits: bool = False
    ) -> ErrorCode | None: ...


def judged_by_coordinator(
    header: Header, *, ready: bool, full: bool, barrier: bool = False, waits: bool = False
) -> ErrorCode | None:
    lease = Lease(b"peer", 5, "", 0.0)
    lease.welcome()
    lease.in_flight = 3 if full else 0
    if waits:
        lease.sampling.opened(7)
    try:
        lease.judge_ordered(header, 1, 3, Gang.READY if ready else Gang.LOADING, barrier=barrier)
    except WireError as error:
        return error.code
    return None


def judged_by_fake_gang(
    header: Header, *, ready: bool, full: bool, barrier: bool = False, waits: bool = False
) -> ErrorCode | None:
    gang = FakeGang(ready=ready)
    gang.hold_back()
    gang.receive(b"peer", [Header(Kind.HELLO, 0, 0, 5).encode(), b"\x80"])
    for seq in range(1, 4 if full else 1):
        flags = int(HeaderFlag.SAMPLE_FOLLOWS) if waits and seq == 3 else 0
        gang.receive(b"peer", [Header(Kind.STEP, flags, 1, 5, seq).encode(), b"\x90"])
    seq = header.seq + 3 if full else header.seq
    if barrier:
        gang.receive(b"peer", [Header(Kind.STEP, 0, 1, 5, 1).encode(), b"\x90"])
        gang.receive(b"peer", [Header(Kind.CONTROL, 0, 1, 5, 2).encode(), encode_body(operations.Sleep())])
    gang.receive(b"peer", [header._replace(seq=seq).encode(), b"\x90"])
    answer = decode_body(*[(decode_header(head).kind, body) for _, head, body in gang.outbox][-1])
    return answer.code if isinstance(answer, messages.Error) else None


def test_what_is_taken_in_which_state() -> None:
    told = re.search(r"Steps are taken in READY alone, a Control in (.*?)\. STOPPED", SPEC, re.DOTALL)
    assert told
    control = {Gang(name) for name in re.findall(r"[A-Z_]{3,}", told[1])}
    for kind, states in ((Kind.STEP, {Gang.READY}), (Kind.CONTROL, control)):
        lease = Lease(b"peer", 5, "", 0.0)
        lease.welcome()
        for state in Gang:
            taken = True
            try:
                lease.judge_ordered(Header(kind, 0, 1, 5, 1), 1, 3, state, barrier=False)
            except WireError as error:
                taken = error.code is not ErrorCode.NOT_READY
            assert taken == (state in states), (kind, state)


@pytest.mark.parametrize("judge", [judged_by_coordinator, judged_by_fake_gang])
def test_a_step_that_is_wrong_in_every_way_is_told_them_in_the_order_of_the_table(judge: Judge) -> None:
    rows = [row[0].strip("`") for row in tables(section("14. Errors: the first tier"))[0]]
    wrong = Header(Kind.STEP, 0, 2, 5, 9)
    told = [
        judge(wrong, ready=False, full=False),
        judge(wrong._replace(epoch=1), ready=False, full=False),
        judge(wrong._replace(epoch=1), ready=True, full=False, barrier=True),
        judge(wrong._replace(epoch=1), ready=True, full=True),
        judge(wrong._replace(epoch=1, seq=1), ready=True, full=True, waits=True),
        judge(wrong._replace(epoch=1, seq=1, kind=Kind.SAMPLE), ready=True, full=True),
        judge(wrong._replace(epoch=1, seq=1), ready=True, full=True),
        judge(wrong._replace(epoch=1, seq=1), ready=True, full=False),
    ]
    assert told == [*map(ErrorCode, rows[rows.index("BAD_EPOCH") :]), None]
