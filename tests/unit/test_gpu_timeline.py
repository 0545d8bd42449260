"""A device's timeline over made-up events: where steps begin and end, what a gap is, what the picture says."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from gpu_steps import Event, events_of, timeline_of
from gpu_timeline import ATTENTION, COLOURS, COPY, GAP, PRODUCTS, SAMPLING, SMALL, between, kind_of, picture, runs

LAYERS = ("rms_norm", "few_rows_product", "place_heads", "decode_attention", "few_rows_product")


def event(name: str, start: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start, "dur": duration, "args": {"grid": [1, 1, 1]}}


def trace(steps: int, *, packet: str, gap: float = 8.0, layers: int = 40, kernel: float = 4.0) -> list[dict[str, Any]]:
    """Steps a `gap` apart, in which the next packet is brought; answers are copied while the next step runs."""
    clock, found = 1000.0, [event("cudaGraphLaunch", 990, 5, "cuda_runtime")]
    for step in range(steps):
        if step:
            found.append(event(packet, clock + 2, 3, "kernel" if packet == "copy_packet" else "gpu_memcpy"))
            clock += gap
        names = ["choose_inputs", *LAYERS * layers, "argmax_whole", "deliver"]
        for place, name in enumerate(names):
            found.append(event(name, clock + kernel * place, kernel))
        found.append(event("Memcpy DtoH (Device -> Pinned)", clock + 3 * kernel, 2, "gpu_memcpy"))
        clock += kernel * len(names)
    return found[::-1]  # a trace has no order


@pytest.mark.parametrize("packet", ["copy_packet", "Memcpy HtoD (Pinned -> Device)"])
def test_a_gap_is_from_a_steps_last_kernel_to_the_next_ones_first(packet: str) -> None:
    timeline = timeline_of(events_of(trace(14, packet=packet)))
    assert len(timeline.steps) == 10
    assert timeline.gaps == [8.0] * 10  # of the first one too: an earlier step is there
    assert timeline.in_gaps() == {packet: [3.0] * 10}
    assert {step.end - step.start for step in timeline.steps} == {203 * 4.0}
    assert timeline.us_a_step == pytest.approx(203 * 4 + 0.9 * 8)
    assert between(timeline) == f"In the 10 gaps: {packet}, 10 x 3.0 µs (38% of the gaps)."


def test_the_first_step_of_a_trace_has_no_gap() -> None:
    timeline = timeline_of(events_of(trace(3, packet="copy_packet")))
    assert (len(timeline.steps), timeline.gaps) == (3, [8.0, 8.0])
    assert "<svg" in picture(timeline, "short")


def test_what_kernels_are_charged_with_is_all_the_time() -> None:
    timeline = timeline_of(events_of(trace(4, packet="copy_packet")))
    charged = timeline.charged()
    assert sum(map(sum, charged.values())) == pytest.approx(4 * timeline.us_a_step)
    assert charged["copy_packet", "[1, 1, 1]"] == [5.0] * 3  # its own 3, and 2 in which nothing ran
    assert sorted(charged["choose_inputs", "[1, 1, 1]"]) == [4.0] + [7.0] * 3


def test_an_overlapping_kernel_is_charged_with_what_it_adds() -> None:
    events = [event("choose_inputs", 0, 10), event("rms_norm", 5, 7), event("deliver", 6, 2)]
    timeline = timeline_of(events_of(events))
    assert timeline.steps[0].end == 12
    assert timeline.charged() == {
        ("deliver", "[1, 1, 1]"): [8],
        ("choose_inputs", "[1, 1, 1]"): [2],
        ("rms_norm", "[1, 1, 1]"): [2],
    }


def test_a_trace_without_steps_is_said() -> None:
    with pytest.raises(ValueError, match="no kernel choose_inputs among 1 events"):
        timeline_of(events_of([event("rms_norm", 0, 1)]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("some_rows_product", PRODUCTS),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", PRODUCTS),
        ("decode_attention", ATTENTION),
        ("void flashinfer::PrefillWithKVCacheKernel<X>", ATTENTION),
        ("argmax_parts", SAMPLING),
        ("add_rms_norm", SMALL),
    ],
)
def test_kernels_have_the_colour_of_their_kind(name: str, kind: str) -> None:
    assert kind_of(Event(name, 0, 1, copy=False)) == kind
    assert kind_of(Event(name, 0, 1, copy=True)) == COPY


def test_bars_thinner_than_a_pixel_are_merged() -> None:
    products = [Event("few_rows_product", 0.2 * n, 0.2 * n + 0.19, copy=False) for n in range(50)]
    lone = [Event("rms_norm", 12.0, 12.2, copy=False), Event("decode_attention", 14, 16, copy=False)]
    assert runs([*products, *lone], 0, 1, 20) == [(0, 10, PRODUCTS), (14, 2, ATTENTION)]


@pytest.mark.parametrize(("layers", "kernel"), [(40, 4.0), (120, 9.0)])
def test_the_picture_is_whole_and_small(layers: int, kernel: float) -> None:
    timeline = timeline_of(events_of(trace(14, packet="copy_packet", gap=8.2, layers=layers, kernel=kernel)))
    drawn = picture(timeline, "0.6b decode <1>")
    root = ElementTree.fromstring(drawn)
    texts = ["".join(found.itertext()) for found in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"0.6b decode <1>: {timeline.us_a_step:.0f} µs a step of 10, largest gap 8.2 µs" in texts
    assert texts.count("8.2") == 10
    fills = {found.get("fill") for found in root.iter()}
    assert {GAP, *COLOURS.values()} <= fills
    assert len(drawn) < 150_000
