"""The emulated exponential: column choice, bit-exact arithmetic, published error table."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from fa4tune.errors import ConfigError
from fa4tune.kernels.exp2 import (
    POLYNOMIALS,
    emulated_columns,
    exp2_polynomial,
    fused_multiply_add,
    round_to_bfloat16,
)

POINTS = 4_000_000


@pytest.fixture(scope="module")
def unit_interval() -> np.ndarray:
    return np.random.default_rng(20).random(POINTS, dtype=np.float32)


@pytest.fixture(scope="module")
def exact(unit_interval: np.ndarray) -> np.ndarray:
    return np.exp2(unit_interval.astype(np.float64))


def relative_error(value: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    error = np.abs(value.astype(np.float64) - exact) / exact
    return float(error.max()), float(error.mean())


# Published: 4M random inputs in [0, 1) against float64, three significant digits.
PUBLISHED = {
    3: ("8.77e-05", "5.43e-05", "3.90e-03", "1.41e-03"),
    4: ("3.05e-06", "1.84e-06", "3.89e-03", "1.41e-03"),
    5: ("1.44e-07", "5.48e-08", "3.89e-03", "1.41e-03"),
}


@pytest.mark.parametrize("degree", PUBLISHED)
def test_polynomial_errors_match_the_published_table(
    degree: int, unit_interval: np.ndarray, exact: np.ndarray
) -> None:
    value = exp2_polynomial(unit_interval, degree)
    figures = relative_error(value, exact) + relative_error(round_to_bfloat16(value), exact)
    assert tuple(f"{figure:.2e}" for figure in figures) == PUBLISHED[degree]


def test_ideal_bfloat16_errors_match_the_published_table(exact: np.ndarray) -> None:
    # Rounding float64 to float32 first moves no digit that is printed.
    figures = relative_error(round_to_bfloat16(exact.astype(np.float32)), exact)
    assert tuple(f"{figure:.2e}" for figure in figures) == ("3.89e-03", "1.41e-03")


def test_degree_three_equals_correctly_rounded_bfloat16_on_99_percent(
    unit_interval: np.ndarray, exact: np.ndarray
) -> None:
    polynomial = round_to_bfloat16(exp2_polynomial(unit_interval, 3)).view(np.int32) >> 16
    ideal = round_to_bfloat16(exact.astype(np.float32)).view(np.int32) >> 16
    assert np.mean(polynomial == ideal) == pytest.approx(0.9901, abs=5e-4)
    assert np.abs(polynomial - ideal).max() <= 1


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_coefficients_are_float32_and_start_at_one(degree: int) -> None:
    coefficients = POLYNOMIALS[degree]
    assert len(coefficients) == degree + 1
    assert coefficients[0] == 1.0
    assert all(float(np.float32(value)) == value for value in coefficients)


def test_error_falls_with_degree(unit_interval: np.ndarray, exact: np.ndarray) -> None:
    sample, truth = unit_interval[:20_000], exact[:20_000]
    errors = [relative_error(exp2_polynomial(sample, degree), truth)[0] for degree in sorted(POLYNOMIALS)]
    assert all(low < high / 10 for high, low in pairwise(errors))


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_integers_are_exact(degree: int) -> None:
    x = np.arange(-126, 128, dtype=np.float32)
    assert np.array_equal(exp2_polynomial(x, degree), np.ldexp(np.float32(1), x.astype(np.int32)))


@pytest.mark.parametrize("degree", POLYNOMIALS)
def test_relative_error_is_the_same_in_every_binade(degree: int, unit_interval: np.ndarray) -> None:
    # An argument n + f with f a multiple of 2^-16 is exact in float32, so only the exponent may differ.
    fraction = np.floor(unit_interval[:5000] * 65536) / np.float32(65536)
    base = exp2_polynomial(fraction.astype(np.float32), degree)
    for shift in (-126, -30, -1, 8, 127):
        shifted = exp2_polynomial((fraction + shift).astype(np.float32), degree)
        assert np.array_equal(shifted, np.ldexp(base, shift))


def test_small_arguments_vanish() -> None:
    x = np.array([-127, -128, -1e30, -np.inf], np.float32)
    assert not exp2_polynomial(x, 3).any()
    just_above = exp2_polynomial(np.array([-126.5], np.float32), 3)
    assert 0 <= just_above[0] < np.finfo(np.float32).tiny


def test_arguments_next_to_zero_are_one() -> None:
    tiny = np.finfo(np.float32).tiny
    subnormal = np.float32(1e-40)
    x = np.array([0.0, -0.0, tiny, subnormal, -subnormal], np.float32)
    assert np.array_equal(exp2_polynomial(x, 3), np.ones(5, np.float32))
    # A negative normal number rounds down to -1, and its fraction rounds to 1.
    assert exp2_polynomial(np.array([-tiny], np.float32), 3)[0] == pytest.approx(1.0, rel=9e-5)


def test_fused_multiply_add_rounds_once() -> None:
    rng = np.random.default_rng(3)
    a = rng.standard_normal(3000).astype(np.float32)
    b = rng.standard_normal(3000).astype(np.float32)
    # Addends around the product: cancellation, and sums near a tie of float32.
    c = (rng.standard_normal(3000) * np.exp2(rng.integers(-40, 40, 3000))).astype(np.float32)
    got = fused_multiply_add(a, b, c)
    for x, y, z, value in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert value == nearest_float32(exact)


@pytest.mark.parametrize("sign", [1, -1])
def test_fused_multiply_add_does_not_round_twice(sign: int) -> None:
    # The sum is 1 + 2^-23 + 2^-24 - 2^-56, just below a tie of float32 by less than float64 can see. Rounded
    # to float64 it is the tie, which goes up to the even 1 + 2^-22.
    a, b = np.float32(sign * 2.0**-12 * (1 - 2.0**-16)), np.float32(2.0**-12 * (1 + 2.0**-16))
    c = np.float32(sign * (1 + 2.0**-23))
    assert np.float32(float(a) * float(b) + float(c)) == sign * np.float32(1 + 2.0**-22)
    assert fused_multiply_add(a, b, c) == c


def nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to an exact rational, ties to even."""
    guess = np.float32(float(value))
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(
        candidates,
        key=lambda item: (abs(Fraction(float(item)) - value), int(np.float32(item).view(np.uint32)) & 1),
    )


def test_round_to_bfloat16_is_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[: 2**16] = (np.arange(2**16, dtype=np.uint32) << 16) | 0x8000  # every tie
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(round_to_bfloat16(values), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((np.zeros(1, np.float32), 6), "not 6"), ((np.zeros(1), 3), "float64"), ((np.float32([128]), 3), "128")],
)
def test_polynomial_refuses_what_it_cannot_do(arguments: tuple[np.ndarray, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        exp2_polynomial(*arguments)


TILES = [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256]


@pytest.mark.parametrize("tile_n", TILES)
@pytest.mark.parametrize("share", range(17))
def test_share_is_met_exactly_in_pairs(tile_n: int, share: int) -> None:
    columns = emulated_columns(tile_n, share, 0)
    assert len(columns) == tile_n
    assert columns[0::2] == columns[1::2]
    assert sum(columns) == 2 * int(Fraction(share * tile_n, 32) + Fraction(1, 2))


@pytest.mark.parametrize("tile_n", TILES)
@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("share", [1, 2, 3, 4, 8, 12])
def test_fragments_before_start_and_last_are_spared(tile_n: int, start: int, share: int) -> None:
    fragments = -(-tile_n // 32)
    try:
        columns = emulated_columns(tile_n, share, start)
    except ConfigError:
        pairs = int(Fraction(share * tile_n, 32) + Fraction(1, 2))
        assert start >= fragments or 2 * pairs > tile_n - 32 * start
        return
    assert not any(columns[: 32 * start])
    last = columns[32 * (fragments - 1) :]
    if any(last):
        assert sum(columns) > 32 * (fragments - 1 - start)


@pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 6, 10])
def test_emulated_columns_are_spread_evenly(share: int) -> None:
    columns = emulated_columns(128, share, 0)
    usable = columns[0:96:2]  # three fragments of four, one entry a pair
    if 2 * sum(usable) < sum(columns):
        usable = columns[0::2]
    density = Fraction(sum(usable), len(usable))
    for low in range(len(usable)):
        for high in range(low + 1, len(usable) + 1):
            assert abs(sum(usable[low:high]) - density * (high - low)) <= 1


def test_no_share_emulates_nothing_and_full_share_everything() -> None:
    assert not any(emulated_columns(128, 0, 3))
    assert all(emulated_columns(128, 16, 0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((128, 16, 1), "leaves 96"),
        ((128, 17, 0), "not 17"),
        ((128, -1, 0), "not -1"),
        ((128, 2, 4), "not 4"),
        ((63, 2, 0), "63"),
        ((0, 2, 0), "not 0"),
        ((128, 2, 0, 31), "31"),
    ],
)
def test_unfit_share_is_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        emulated_columns(*arguments)
