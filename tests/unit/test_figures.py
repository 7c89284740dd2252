"""Numbers in sentences."""

import pytest

from orchestrator.figures import figure


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (12345.6, 4, "12346"),
        (9999.6, 4, "10000"),
        (1234.5, 4, "1234"),
        (99.97, 2, "100"),
        (-477.3, 2, "-477"),
        (0.51402, 4, "0.514"),
        (0.00012, 4, "0.00012"),
        (0.00001, 4, "1e-05"),
        (0.0, 4, "0"),
        (float("inf"), 4, "inf"),
        (float("nan"), 4, "nan"),
        (3e20, 4, "3e+20"),
    ],
)
def test_a_figure_has_no_exponent_where_digits_show_it(number: float, digits: int, text: str) -> None:
    assert figure(number, digits) == text


def test_a_figure_of_a_difference_has_its_sign() -> None:
    assert [figure(number, 2, "+") for number in (430.4, 0.52, -3.0)] == ["+430", "+0.52", "-3"]
