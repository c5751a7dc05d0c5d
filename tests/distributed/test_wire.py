"""Wire formats against slow oracles in plain Python, for values of every kind that a float32 can
be.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from adloco.distributed.codecs.bf16 import Bf16
from adloco.distributed.codecs.codec import WireFormat
from adloco.distributed.codecs.int2 import Int2
from adloco.distributed.codecs.int4 import Int4
from adloco.distributed.codecs.int8 import Int8
from adloco.distributed.codecs.topk import TopK

FORMATS: list[WireFormat] = [
    Bf16(),
    Int8(),
    Int8(block=7),
    Int4(),
    Int4(block=2),
    Int4(block=10),
    Int2(),
    Int2(block=4),
    Int2(block=12),
    TopK(),
    TopK(chunk=256),
    TopK(chunk=64, density=0.25),
    TopK(chunk=8, density=1.0),
    TopK(chunk=2),
    TopK(chunk=1024, density=1e-9),
]
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
Generator = np.random.Generator
Array = npt.NDArray[Any]


def outliers(rng: Generator, rows: int, width: int) -> Array:
    values = rng.normal(size=(rows, width)) * 1e-3
    values[np.arange(rows), rng.integers(width, size=rows)] = 1e30 * rng.choice([-1, 1], size=rows)
    return values


KINDS: dict[str, Callable[[Generator, int, int], Array]] = {
    "normal": lambda rng, rows, width: rng.normal(size=(rows, width)) * 1e-4,
    "student": lambda rng, rows, width: rng.standard_t(2, size=(rows, width)),
    "cauchy": lambda rng, rows, width: rng.standard_cauchy(size=(rows, width)),
    "every scale": lambda rng, rows, width: (
        rng.choice([-1, 1], size=(rows, width))
        * 2.0 ** rng.uniform(-149, 127.9, size=(rows, width))
    ),
    "outliers": outliers,
    "few values": lambda rng, rows, width: rng.integers(-3, 4, size=(rows, width)) * 0.3,
    "almost all zero": lambda rng, rows, width: (
        rng.normal(size=(rows, width)) * (rng.random(size=(rows, width)) < 0.01)
    ),
    "zeros": lambda rng, rows, width: np.zeros((rows, width)),
    "negative zeros": lambda rng, rows, width: np.full((rows, width), -0.0),
    "the smallest": lambda rng, rows, width: rng.integers(-1, 2, size=(rows, width)) * SMALLEST,
    "denormal": lambda rng, rows, width: rng.integers(-3000, 3000, size=(rows, width)) * SMALLEST,
    "the largest": lambda rng, rows, width: rng.choice(
        [-LARGEST, 0.0, 1e-45, LARGEST / 3, LARGEST], size=(rows, width)
    ),
    "all the largest": lambda rng, rows, width: np.full((rows, width), -LARGEST),
}


def blocks_of(kind: str, wire: WireFormat, *, numbers: int = 2000) -> Array:
    rows = max(3, numbers // wire.block)
    return KINDS[kind](np.random.default_rng(7), rows, wire.block).astype(np.float32)


def sent(wire: WireFormat, values: Array) -> Array:
    return wire.decode(wire.encode(torch.from_numpy(values))).numpy()


def nearest_bf16(value: float) -> float:
    """The nearer of the two bfloat16 around a finite float32, the even one if both are as near; no
    infinity.
    """
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    around = []
    for upper in (bits >> 16, (bits >> 16) + 1):
        (candidate,) = struct.unpack("<f", struct.pack("<I", upper << 16))
        if math.isfinite(candidate):
            around.append((abs(candidate - value), upper & 1, candidate))
    return float(min(around)[2])


@pytest.mark.parametrize("wire", FORMATS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_what_holds_for_every_format(kind: str, wire: WireFormat) -> None:
    values = torch.from_numpy(blocks_of(kind, wire))
    before = values.clone()
    encoded = wire.encode(values)
    assert values.equal(before)
    assert encoded.shape == (len(values), wire.block_bytes)
    assert encoded.dtype == torch.uint8
    assert encoded.is_contiguous()
    decoded = wire.decode(encoded)
    assert decoded.shape == values.shape
    assert decoded.dtype == torch.float32
    assert decoded.isfinite().all()
    assert not decoded[values == 0].any(), "a zero stays zero"
    assert (decoded * values.sign() >= 0).all(), "no sign changes"
    assert encoded.equal(wire.encode(values))
    # Sent once more: the mean as its owner has it and as the others get it must be one.
    assert wire.decode(wire.encode(decoded)).equal(decoded)
    # A block's bytes depend on its values alone, wherever they lie in memory and whatever is
    # encoded with them.
    assert encoded[1:].equal(wire.encode(values[1:]))
    spread = torch.stack([values, torch.full_like(values, 3.0)], dim=2)[:, :, 0]
    assert encoded.equal(wire.encode(spread))
    assert encoded.equal(wire.encode(values.T.contiguous().T))
    # Bytes may begin anywhere in memory, even where no float32 can.
    memory = torch.zeros(encoded.numel() + 1, dtype=torch.uint8)
    memory[1:] = encoded.flatten()
    assert wire.decode(memory[1:].view(encoded.shape)).equal(decoded)


@pytest.mark.parametrize("wire", FORMATS, ids=repr)
def test_no_blocks(wire: WireFormat) -> None:
    encoded = wire.encode(torch.zeros(0, wire.block))
    assert encoded.shape == (0, wire.block_bytes)
    assert wire.decode(encoded).shape == (0, wire.block)


def test_sizes() -> None:
    """TopK of 4096: 64 values of 12 + 2 bits are 112 bytes, 256 are 448, and two bfloat16."""
    assert [(wire.block, wire.block_bytes) for wire in (Bf16(), Int8(), Int4(), Int2())] == [
        (64, 128),
        (256, 260),
        (128, 68),
        (128, 36),
    ]
    assert (TopK().block, TopK().block_bytes, TopK(density=1 / 64).block_bytes) == (4096, 452, 116)
    assert Int8(block=100).block_bytes == 104
    assert Int4(block=100).block_bytes == 54
    assert TopK(chunk=65536, density=1e-9).block_bytes == 4 + 3  # One value of 16 + 2 bits.
    assert TopK(chunk=8, density=1.0).block_bytes == 4 + 5  # Eight of 3 + 2 bits.
    assert TopK(chunk=8, density=0.3).kept == 2
    assert [wire.sums_in_blocks for wire in (Bf16(), Int8(), Int4(), Int2(), TopK())] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_layouts_by_hand() -> None:
    """These layouts are all that another program needs to know to read the bytes."""
    one = [0x00, 0x00, 0x80, 0x3F]  # 1.0 in float32; its last two bytes are 1.0 in bfloat16.
    assert Bf16().encode(torch.ones(1, 64)).tolist() == [[0x80, 0x3F] * 64]
    assert Int8(block=3).encode(torch.tensor([[1.0, -1.0, 0.25]])).tolist() == [
        [*one, 127, 129, 32]
    ]  # 0.25 * 127 = 31.75.
    # Codes are 8 for the sign and the number of halvings, 7 for zero: 1 is 0, -1/4 is 10, 0 is 7
    # and 1/64 is 6.
    assert Int4(block=4).encode(torch.tensor([[1.0, -0.25, 0.0, 1 / 64]])).tolist() == [
        [*one, 0x0A, 0x76]
    ]
    assert Int4(block=4).encode(torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0, 0x77, 0x77]]
    # Entries of 3 + 2 bits, the largest first: 5 of -1 is 5 * 4 + 3 = 23, 2 of 0.5 is 2 * 4 = 8.
    # Together 23 + 8 * 32 = 279 = 256 + 23.
    chunk = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.0, -1.0, 0.0, 0.0]])
    assert TopK(chunk=8, density=0.25).encode(chunk).tolist() == [[0x80, 0x3F, 0x00, 0x3F, 23, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_the_nearest(kind: str) -> None:
    values = blocks_of(kind, Bf16())
    expected = [nearest_bf16(float(value)) for value in values.flatten()]
    assert sent(Bf16(), values).flatten().tolist() == expected
    exact = values.astype(np.float64)
    assert (np.abs(sent(Bf16(), values) - exact) <= np.abs(exact) / 256 + 2.0**-134).all()


def test_bf16_ties_go_to_the_even_one() -> None:
    # Steps of bfloat16 above 1 are 1/128: 1 + 1/256 lies between 1 (even) and 1 + 1/128, 1 + 3/256
    # between that and 1 + 1/64 (even).
    values = np.full((1, 64), 1.0, dtype=np.float32)
    values[0, :3] = 1 + 1 / 256, 1 + 3 / 256, -(1 + 3 / 256)
    assert sent(Bf16(), values)[0, :4].tolist() == [1.0, 1 + 1 / 64, -(1 + 1 / 64), 1.0]


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_the_nearest_multiple(kind: str, block: int) -> None:
    wire = Int8(block=block)
    values = blocks_of(kind, wire)
    for row, decoded in zip(
        values.astype(np.float64), sent(wire, values).astype(np.float64), strict=True
    ):
        absmax = max(abs(value) for value in row)
        for value, result in zip(row, decoded, strict=True):
            assert abs(result - value) <= absmax / 254 * (1 + 1e-4) + 2.0**-150
            # A multiple of absmax / 127, as a float32 has it.
            code = round(result / absmax * 127) if absmax else 0
            assert abs(code) <= 127
            assert abs(result - code * absmax / 127) <= 2.0**-22 * abs(result) + 2.0**-150
        assert absmax in np.abs(decoded), "the largest is exact"


@pytest.mark.parametrize("block", [2, 10, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_int4_is_the_nearest_of_fifteen_levels(kind: str, block: int) -> None:
    wire = Int4(block=block)
    values = blocks_of(kind, wire)
    rounding = 1 + 2.0**-21
    for row, decoded in zip(
        values.astype(np.float64), sent(wire, values).astype(np.float64), strict=True
    ):
        absmax = max(abs(value) for value in row)
        levels = [0.0] + [sign * absmax * 2.0**-k for sign in (1, -1) for k in range(7)]
        for value, result in zip(row, decoded, strict=True):
            assert min(abs(result - level) for level in levels) <= 2.0**-150
            assert (
                abs(result - value)
                <= min(abs(value - level) for level in levels) * rounding + 2.0**-150
            )
            assert abs(result - value) <= max(abs(value) / 3, absmax / 128) * rounding + 2.0**-150
            assert abs(result - value) <= abs(value) * rounding + 2.0**-150
        assert absmax in np.abs(decoded), "the largest is exact"


def test_int4_thresholds() -> None:
    """Thresholds are exact to the last bit, for both signs: a value half-way between two levels
    gets the larger one, and the next smaller value the smaller one.
    """
    thresholds = [1.5 * 2.0**-k for k in range(1, 7)] + [2.0**-7]
    above = [2.0**-k for k in range(7)]
    below = [*above[1:], 0.0]
    at = np.array(thresholds, dtype=np.float32)
    under = np.nextafter(at, np.float32(0))
    for sign in (1.0, -1.0):
        for absmax in (1.0, 2.0**100, 2.0**-110):
            row = (sign * absmax * np.concatenate([at, under, [1.0, 0.0]])).astype(np.float32)[None]
            assert (sent(Int4(block=16), row)[0] / absmax * sign).tolist() == [
                *above,
                *below,
                1.0,
                0.0,
            ]


def test_int4_shrinks_magnitudes_as_theory_says() -> None:
    """Of log-uniform x in an octave [1, 2) the mean is 1 / ln 2; rounded at 1.5, log2 1.5 of them
    are 1 and the others 2.

    The mean of Q(x) / x is (1 / ln 2) (1 - 2/3 + 2 (2/3 - 1/2)) = 2 / (3 ln 2).

    """
    rng = np.random.default_rng(1)
    values = (
        rng.choice([-1, 1], size=(2000, 128)) * 2.0 ** rng.uniform(-6, 0, size=(2000, 128))
    ).astype(np.float32)
    values[:, 0] = 1.0
    given, got = (
        np.abs(values[:, 1:]).astype(np.float64),
        np.abs(sent(Int4(), values)[:, 1:]).astype(np.float64),
    )
    # Standard errors of these means are below 5e-4.
    assert got.mean() / given.mean() == pytest.approx((2 - math.log2(1.5)) * math.log(2), abs=2e-3)
    assert (got / given).mean() == pytest.approx(2 / (3 * math.log(2)), abs=2e-3)


@pytest.mark.parametrize("block", [4, 12, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_int2_is_the_means_above_and_below_the_mean(kind: str, block: int) -> None:
    """The magnitudes match sums that round only at the end, and the format is a contraction."""
    wire = Int2(block=block)
    values = blocks_of(kind, wire)
    for row, decoded in zip(values.tolist(), sent(wire, values).tolist(), strict=True):
        total = math.fsum(map(abs, row))
        groups = [
            [abs(value) for value in row if abs(value) * block >= total],
            [abs(value) for value in row if abs(value) * block < total],
        ]
        means = [
            nearest_bf16(float(np.float32(math.fsum(group) / len(group)))) if group else 0.0
            for group in groups
        ]
        means[1] *= 0.0 not in row
        assert decoded == [
            math.copysign(means[abs(value) * block < total], value) if value else 0.0
            for value in row
        ]
        scale = max(map(abs, row)) or 1.0
        error = math.fsum(
            ((value - result) / scale) ** 2 for value, result in zip(row, decoded, strict=True)
        )
        normal = min(means[0], means[1] or 1.0) >= 2.0**-126
        assert error <= (1 - normal * (1 - 2.0**-16) / block) * math.fsum(
            (value / scale) ** 2 for value in row
        ) * (1 + 1e-12)


def test_int2_layout_and_error_by_hand() -> None:
    # Mean magnitude 1.375: 2 and 3 are above and have mean 2.5 = 0x4020, 1/4 below. Codes: 2 bits
    # each, large then negative.
    row = torch.tensor([[2.0, -0.25, -3.0, 0.25]])
    assert Int2(block=4).encode(row).tolist() == [[0x20, 0x40, 0x80, 0x3E, 0b10_01_11_00]]
    # With a zero, what is below the mean becomes zero.
    assert Int2(block=4).decode(
        Int2(block=4).encode(torch.tensor([[3.0, -1.0, 0.0, -3.0]]))
    ).tolist() == [[3.0, 0.0, 0.0, -3.0]]
    # Of a normal distribution p lie above its mean magnitude sqrt(2 / pi), with mean a, and q = 1 -
    # p below, with mean b: 1 - p a^2 - q b^2 is lost. Means of the 128 values themselves are nearer
    # to these by the two of 128 degrees of freedom.
    normal = torch.distributions.Normal(0.0, 1.0)
    split = math.sqrt(2 / math.pi)
    p = 2 * (1 - float(normal.cdf(torch.tensor(split))))
    density = math.exp(-(split**2) / 2)
    lost = 1 - (split * density) ** 2 / p - (split * (1 - density)) ** 2 / (1 - p)
    values = np.random.default_rng(2).normal(size=(4000, 128)).astype(np.float32)
    assert ((sent(Int2(), values) - values) ** 2).mean() == pytest.approx(
        lost * 126 / 128, rel=0.01
    )
    assert lost == pytest.approx(0.125, abs=0.001)


def expected_top_k(row: list[float], kept: int) -> list[float]:
    """Top-k by sorting, with means that round only at the end."""
    order = sorted(range(len(row)), key=lambda index: (-abs(row[index]), index))
    chosen = [index for index in order[:kept] if row[index] != 0]
    split = math.fsum(abs(row[index]) for index in chosen) / max(1, len(chosen))
    result = [0.0] * len(row)
    for group in (
        [i for i in chosen if abs(row[i]) >= split],
        [i for i in chosen if abs(row[i]) < split],
    ):
        if group:
            mean = nearest_bf16(
                float(np.float32(math.fsum(abs(row[index]) for index in group) / len(group)))
            )
            for index in group:
                result[index] = math.copysign(mean, row[index])
    return result


SPARSE = [
    (2, 1 / 64),
    (8, 0.5),
    (8, 1.0),
    (64, 0.25),
    (256, 1 / 64),
    (1024, 0.03),
    (4096, 1 / 64),
    (65536, 1 / 512),
]


@pytest.mark.parametrize(("chunk", "density"), SPARSE)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_what_sorting_gives(kind: str, chunk: int, density: float) -> None:
    wire = TopK(chunk=chunk, density=density)
    values = blocks_of(kind, wire, numbers=1000)[: 1 if chunk == 65536 else None]
    for row, decoded in zip(values, sent(wire, values), strict=True):
        assert decoded.tolist() == expected_top_k(row.tolist(), max(1, round(chunk * density)))


@pytest.mark.parametrize(("chunk", "density"), SPARSE[:-1])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_contracts(kind: str, chunk: int, density: float) -> None:
    wire = TopK(chunk=chunk, density=density)
    values = blocks_of(kind, wire)
    for row, decoded in zip(
        values.astype(np.float64), sent(wire, values).astype(np.float64), strict=True
    ):
        scale = max(np.abs(row).max(), SMALLEST)
        error, norm = ((decoded / scale - row / scale) ** 2).sum(), ((row / scale) ** 2).sum()
        means = np.abs(decoded[decoded != 0])
        normal = len(means) == min(wire.kept, np.count_nonzero(row)) and (means >= 2.0**-126).all()
        assert error <= (1 - normal * (1 - 2.0**-16) / chunk) * norm * (1 + 1e-12)


def test_top_k_takes_the_first_of_equal_ones() -> None:
    """Signs do not matter: of the three values kept, one is the 3 at the end, and the others are
    the first two of six twos.
    """
    wire = TopK(chunk=8, density=3 / 8)
    row = torch.tensor([[1.0, -2.0, 2.0, 2.0, -2.0, 2.0, 2.0, 3.0]])
    # Mean of 3, 2, 2 is 2.33: 3 is above, the twos below.
    assert wire.decode(wire.encode(row)).tolist() == [[0.0, -2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0]]
    equal = torch.full((2, 4096), -0.5)
    assert wire_indices(TopK(), equal) == [list(range(256))] * 2


def wire_indices(wire: WireFormat, values: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in wire.decode(wire.encode(values))]


@pytest.mark.parametrize("chunk", [2**power for power in range(1, 17)])
def test_every_index_survives_packing(chunk: int) -> None:
    """Chosen at random, the last index among them, with random signs and magnitudes of two sizes,
    which come back exactly.
    """
    rng = np.random.default_rng(chunk)
    wire = TopK(chunk=chunk, density=min(1.0, 23 / chunk))
    row = np.zeros((3, chunk), dtype=np.float32)
    for values in row:
        index = np.append(rng.choice(chunk - 1, size=wire.kept - 1, replace=False), chunk - 1)
        values[index] = rng.choice([-3.0, 3.0, -0.125, 0.125], size=wire.kept)
    assert sent(wire, row).tolist() == row.tolist()


def test_fewer_values_than_are_kept() -> None:
    """Unused places repeat the largest value, wherever it is."""
    wire = TopK(chunk=16, density=0.5)
    for index in range(16):
        row = np.zeros((1, 16), dtype=np.float32)
        row[0, index] = -4.0
        row[0, (index + 5) % 16] = 1.0
        assert sent(wire, row).tolist() == row.tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Int8(block=0), "block must be > 0, got 0"),
        (lambda: Int4(block=0), "block must be even and > 0, got 0"),
        (lambda: Int4(block=9), "block must be even and > 0, got 9"),
        (lambda: Int2(block=0), "block must be a multiple of 4 and > 0, got 0"),
        (lambda: Int2(block=6), "block must be a multiple of 4 and > 0, got 6"),
        (lambda: TopK(chunk=1), "chunk must be a power of two from 2 to 65536, got 1"),
        (lambda: TopK(chunk=-4), "chunk must be a power of two from 2 to 65536, got -4"),
        (lambda: TopK(chunk=1000), "chunk must be a power of two from 2 to 65536, got 1000"),
        (
            lambda: TopK(chunk=1 << 17),
            "chunk must be a power of two from 2 to 65536, got 131072",
        ),
        (lambda: TopK(density=0.0), "density must be in (0, 1], got 0.0"),
        (lambda: TopK(density=1.5), "density must be in (0, 1], got 1.5"),
        *(
            (
                lambda kind=kind: kind(error_feedback=1.1),
                "error_feedback must be in [0, 1], got 1.1",
            )
            for kind in (Bf16, Int8, Int4, TopK)
        ),
        (lambda: Bf16(error_feedback=math.nan), "error_feedback must be in [0, 1], got nan"),
    ],
)
def test_bad_values(build: Callable[[], WireFormat], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message
