"""Wire formats against slow oracles in plain Python, for values of every kind that a float32 can
be.
"""

import math
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat, check_format, largest_whole
from tests.problems import outer_sync

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
    Int1(),
    Int1(block=8),
    Int1(block=40),
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
    assert wire.key == "int1" or not decoded[values == 0].any(), "a zero stays zero"
    assert (decoded * values.sign() >= 0).all(), "no sign changes"
    assert encoded.equal(wire.encode(values))
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
    formats = (Bf16(), Int8(), Int4(), Int2(), Int1())
    assert [(wire.block, wire.block_bytes) for wire in formats] == [
        (64, 128),
        (256, 260),
        (128, 68),
        (128, 36),
        (256, 34),
    ]
    assert Int8(block=100).block_bytes == 104
    assert Int4(block=100).block_bytes == 54


def test_layouts_by_hand() -> None:
    """These layouts are all that another program needs to know to read the bytes."""
    one = [0x00, 0x00, 0x80, 0x3F]  # 1.0 in float32; its last two bytes are 1.0 in bfloat16.
    assert Bf16().encode(torch.ones(1, 64)).tolist() == [[0x80, 0x3F] * 64]
    assert Int8(block=3).encode(torch.tensor([[1.0, -1.0, 0.25]])).tolist() == [
        [*one, 127, 129, 32]
    ]  # 0.25 * 127 = 31.75.
    # absmax / mean is 3.2, so it is table 0: -1/4 is 255/1023, whose nearest level is the second
    # one, 220. Code 7 is zero, 15 the scale, 5 the second level with the other sign.
    assert Int4(block=4).encode(torch.tensor([[1.0, -0.25, 0.0, 1 / 64]])).tolist() == [
        [*one, 0xF5, 0x77]
    ]
    # The scale has a sign: 1/2 is -1/2 of it, between -454 and -580. absmax / mean is 4/3.
    assert Int4(block=2).encode(torch.tensor([[-1.0, 0.5]])).tolist() == [[0, 0, 0x80, 0xBF, 0xF3]]
    # The largest of 8 is 8 times the mean, so it is table 2, in the lowest bits of the scale.
    assert Int4(block=8).encode(torch.tensor([[0.0] * 7 + [1.0]])).tolist() == [
        [2, *one[1:], 0x77, 0x77, 0x77, 0x7F]
    ]
    # The least absmax / mean of tables 1, 2 and 3.
    for ones, block, table in ((4, 14, 1), (2, 14, 2), (1, 16, 3)):
        row = torch.tensor([[1.0] * ones + [0.0] * (block - ones)])
        assert Int4(block=block).encode(row)[0, :4].tolist() == [table, *one[1:]]
    assert Int4(block=4).encode(torch.zeros(1, 4)).tolist() == [[3, 0, 0, 0, 0x77, 0x77]]


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


def int4_by_numpy(row: Array) -> Array:
    """Int4's values of one block, level by level."""
    scale = row.max() if row.max() >= -row.min() else row.min()
    unit = scale / np.float32(1023) if abs(scale) >= 2.0**-116 else np.float32(1)
    cells = [int(ratio) for ratio in row / unit]
    total = sum(map(abs, cells))
    tails = 1023 * len(row) / total if total else math.inf  # absmax / mean
    table = sum(tails >= limit for limit in (3.5, 7, 16))
    levels = [
        round(1023 * math.sinh((table + 1) * eighth / 8) / math.sinh(table + 1))
        for eighth in range(-7, 9)
    ]
    nearest = [min(levels, key=lambda level: abs(level - cell)) for cell in cells]
    (bits,) = struct.unpack("<I", struct.pack("<f", scale))
    (sent_scale,) = struct.unpack("<f", struct.pack("<I", bits & ~3))
    return np.array(nearest, dtype=np.float32) / np.float32(1023) * np.float32(sent_scale)


@pytest.mark.parametrize("block", [2, 10, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_int4_is_the_nearest_of_sixteen_levels(kind: str, block: int) -> None:
    wire = Int4(block=block)
    values = blocks_of(kind, wire)
    decoded = sent(wire, values)
    tables = wire.encode(torch.from_numpy(values))[:, 0].numpy() & 3
    floors = np.array([0.055, 0.036, 0.021, 0.011])
    for row, result, table in zip(values, decoded, tables, strict=True):
        assert result.tolist() == int4_by_numpy(row).tolist()
        exact, rounding = row.astype(np.float64), 1 + 2.0**-20
        error, absmax = np.abs(result - exact), np.abs(exact).max()
        assert (error <= np.abs(exact) * rounding).all()
        if absmax >= 2.0**-116:
            limit = np.maximum(0.4 * np.abs(exact), floors[table] * absmax)
            assert (error <= limit * rounding).all()
            scaled = exact / absmax
            norm = (scaled**2).sum()
            assert ((error / absmax) ** 2).sum() <= (1 - (1 - 2.0**-20) / block) * norm * rounding
        else:
            assert not result.any()


def relative_error(wire: WireFormat, values: Array) -> float:
    exact = values.astype(np.float64)
    return float(np.linalg.norm(sent(wire, values) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(
    ("wire", "normal", "student"),
    [(Int4(), 0.0916, 0.108), (Int2(), 0.341, 0.475), (Int1(), 0.602, 0.76)],
)
def test_errors_of_normal_and_of_heavy_tailed_values(
    wire: WireFormat, normal: float, student: float
) -> None:
    """4 bits: <= 0.10 and 0.15. 2 bits: <= 0.35 and 0.50. The best 16 levels for all blocks of a
    normal distribution (Lloyd-Max) leave 0.0975, 4 leave 0.343, and 2 leave 0.603.

    No block's error is far from the others', whatever its scale.
    """
    rng = np.random.default_rng(2)
    scales = 2.0 ** rng.uniform(-60, 60, size=(8000, 1))
    gaussian = rng.normal(size=(8000, wire.block)).astype(np.float32)
    heavy = rng.standard_t(3, size=(8000, wire.block)).astype(np.float32)
    assert relative_error(wire, gaussian) == pytest.approx(normal, rel=0.01)
    assert relative_error(wire, heavy) == pytest.approx(student, rel=0.04)
    each = [relative_error(wire, row[None]) for row in (gaussian * scales).astype(np.float32)[:200]]
    assert max(each) < 1.35 * normal


def test_the_largest_blocks_are_nearly_as_good() -> None:
    """The error of normal values by the same rule without rounding is 0.347 in blocks of 512; by
    one magnitude it is 0.603 (as in smaller blocks).
    """
    values = np.random.default_rng(3).normal(size=(400, 4096)).astype(np.float32)
    assert relative_error(Int2(block=512), values.reshape(-1, 512)) < 0.355
    assert relative_error(Int1(block=4096), values) < 0.604


@pytest.mark.parametrize("wire", [Int8(), Int4(), Int2(), Int1()], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(wire: WireFormat, bad: float) -> None:
    """No format makes an ordinary number of it; the other blocks are as without it."""
    values = torch.randn(3, wire.block, generator=torch.Generator().manual_seed(0))
    without = wire.decode(wire.encode(values))
    values[1, 5] = bad
    decoded = wire.decode(wire.encode(values))
    assert not decoded[1, 5].isfinite()
    assert decoded[::2].equal(without[::2])


def in_whole_numbers(kind: str, wire: WireFormat) -> Iterator[tuple[Array, Array, Any, list[int]]]:
    """(row, decoded row, unit, row in whole units) of blocks that are not as good as zero."""
    values = blocks_of(kind, wire)
    for row, decoded in zip(values, sent(wire, values), strict=True):
        absmax = np.abs(row).max()
        if absmax < 2.0**-100:
            assert not decoded.any()
            continue
        unit = absmax / np.float32(largest_whole(wire.block))
        yield row, decoded, unit, [int(number) for number in np.rint(row / unit)]


def check_contraction(row: Array, decoded: Array, smallest: float) -> None:
    """The error of a row is bounded, and smaller than the row unless its magnitudes are denormal.

    smallest: The smallest magnitude that is not zero.
    """
    absmax = np.abs(row).max()
    exact = row.astype(np.float64) / absmax
    error, norm = ((decoded / absmax - exact) ** 2).sum(), (exact**2).sum()
    normal = smallest >= 2.0**-126
    assert error <= (1 - normal * (1 - 2.0**-16) / len(row)) * norm * (1 + 1e-5)


@pytest.mark.parametrize("block", [4, 12, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_int2_is_the_means_of_the_large_and_of_the_others(kind: str, block: int) -> None:
    """The magnitudes match sums that round only at the end, and the format is a contraction."""
    for row, decoded, unit, whole in in_whole_numbers(kind, Int2(block=block)):
        large = [
            8 * block * abs(each) >= 7 * sum(map(abs, whole)) + largest_whole(block) * block
            for each in whole
        ]
        groups = [
            [abs(each) for each, is_large in zip(whole, large, strict=True) if is_large == wanted]
            for wanted in (True, False)
        ]
        means = [
            nearest_bf16(float(np.float32(sum(group) / len(group)) * unit)) if group else 0.0
            for group in groups
        ]
        means[1] *= 0 not in whole
        assert decoded.tolist() == [
            math.copysign(means[0] if is_large else means[1], value)
            for value, is_large in zip(row.tolist(), large, strict=True)
        ]
        check_contraction(row, decoded, min(means[0], means[1] or 1.0))


def test_int2_layout_by_hand() -> None:
    # Mean magnitude 1.375, largest 3: 2 and 3 are at least 1.578 and have mean 2.5 = 0x4020, 1/4 is
    # below. Codes are 0 for -2.5, 1 for -1/4, 2 for 1/4 and 3 for 2.5.
    row = torch.tensor([[2.0, -0.25, -3.0, 0.25]])
    assert Int2(block=4).encode(row).tolist() == [[0x20, 0x40, 0x80, 0x3E, 0b11_01_00_10]]
    # 9 is just large: the mean, 8, and an eighth of the way to 16.
    row = torch.tensor([[16.0, 9.0, -4.0, 3.0]])
    assert sent(Int2(block=4), row.numpy()).tolist() == [[12.5, 12.5, -3.5, 3.5]]
    # The next smaller whole number of 16 / 2^20 is not, so the others' mean is 16/3.
    row += torch.tensor([[0.0, -(2**-16), -(2**-16), 0.0]])
    others = 5.34375
    assert sent(Int2(block=4), row.numpy()).tolist() == [[16.0, others, -others, others]]
    # With a zero, what is not large becomes zero.
    assert Int2(block=4).decode(
        Int2(block=4).encode(torch.tensor([[3.0, -1.0, 0.0, -3.0]]))
    ).tolist() == [[3.0, 0.0, 0.0, -3.0]]


@pytest.mark.parametrize("block", [8, 40, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_int1_is_the_sign_and_the_mean_magnitude(kind: str, block: int) -> None:
    """The magnitude matches sums that round only at the end, and the format is a contraction."""
    for row, decoded, unit, whole in in_whole_numbers(kind, Int1(block=block)):
        mean = nearest_bf16(float(np.float32(sum(map(abs, whole)) / block) * unit))
        assert decoded.tolist() == [mean if value >= 0 else -mean for value in row.tolist()]
        check_contraction(row, decoded, mean)


def test_int1_layout_by_hand() -> None:
    # The mean magnitude is 1.5 = 0x3FC0. The first value is the lowest bit; zeros are positive.
    row = torch.tensor([[2.0, -1.0, -4.0, 0.0, 1.0, -0.0, 3.0, -1.0]])
    assert Int1(block=8).encode(row).tolist() == [[0xC0, 0x3F, 0b01111001]]
    assert sent(Int1(block=8), row.numpy()).tolist() == [
        [1.5, -1.5, -1.5, 1.5, 1.5, 1.5, 1.5, -1.5]
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Int8(block=0), "block must be in [1, 65536], got 0"),
        (lambda: Int4(block=0), "block must be even and from 2 to 65536, got 0"),
        (lambda: Int4(block=9), "block must be even and from 2 to 65536, got 9"),
        (
            lambda: Int4(block=(1 << 16) + 2),
            "block must be even and from 2 to 65536, got 65538",
        ),
        (lambda: Int2(block=6), "block must be a multiple of 4 and from 4 to 512, got 6"),
        (
            lambda: Int2(block=1 << 10),
            "block must be a multiple of 4 and from 4 to 512, got 1024",
        ),
        (lambda: Int1(block=12), "block must be a multiple of 8 and from 8 to 4096, got 12"),
        (
            lambda: Int1(block=1 << 13),
            "block must be a multiple of 8 and from 8 to 4096, got 8192",
        ),
    ],
)
def test_bad_values(build: Callable[[], WireFormat], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_formats_do_what_the_protocol_says(wire: WireFormat) -> None:
    check_format(wire)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_formats_do_it_whatever_type_a_script_gives_new_tensors(
    wire: WireFormat, dtype: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        check_format(wire)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"encode": lambda values: Int8().encode(values.div_(2))}, "encode must leave the values"),
        ({"encode": lambda values: values.half()}, "encode must give contiguous uint8"),
        (
            {"encode": lambda values: Int8().encode(values).T.contiguous().T},
            "encode must give contiguous uint8",
        ),
        (
            {"encode": lambda values: Int8().encode(values / values.abs().max())},
            "encode must give a block the same bytes each time",
        ),
        ({"decode": lambda blocks: Int8().decode(blocks).flatten()}, "decode must give finite"),
        ({"decode": lambda blocks: Int8().decode(blocks).sqrt()}, "decode must give finite"),
    ],
)
def test_a_format_that_does_not_is_refused(changes: dict[str, Any], sentence: str) -> None:
    own = {"block": 256, "block_bytes": Int8().block_bytes}
    own |= {"encode": Int8().encode, "decode": Int8().decode}
    wire: Any = SimpleNamespace(**own | changes)
    for use in (check_format, lambda each: outer_sync([torch.zeros(3)], None, wire=each)):
        with pytest.raises(ValueError, match=f"SimpleNamespace does not fit: {sentence}"):
            use(wire)
