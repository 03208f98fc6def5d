from assay_smoke.matrix.cases import Case, case_of
from assay_smoke.matrix.coverage import pairs_of
from assay_smoke.matrix.ordering import order_by_value

NAMES = ("one-process-1", "ddp-2", "ddp-2-lora", "ddp-4-lora", "zero3-4-mixtral-offload-sigterm")


def equally_urgent(case: Case) -> tuple[bool, ...]:
    return (False,)


def one_second(case: Case) -> float:
    return 1.0


def test_new_pairs_add_up_to_all_pairs_and_each_counts_once() -> None:
    cases = [case_of(name) for name in NAMES]
    ordered = order_by_value(cases, equally_urgent, one_second)
    new = [pair for valued in ordered for pair in valued.new_pairs]
    assert len(set(new)) == len(new)
    assert set(new) == {pair for case in cases for pair in pairs_of(case)}
    assert {valued.case for valued in ordered} == set(cases)


def test_most_new_pairs_for_each_second_come_first() -> None:
    cases = [case_of(name) for name in NAMES]
    ordered = order_by_value(cases, equally_urgent, one_second)
    gains = [len(valued.new_pairs) for valued in ordered]
    # All have 66 pairs: the first is the first by name; `ddp-4-lora` shares most with others.
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == 12 * 11 / 2

    def slow_if_large(case: Case) -> float:
        return 1000.0 if case.cards == 4 else 1.0

    slow = [valued.case.cards for valued in order_by_value(cases, equally_urgent, slow_if_large)]
    assert slow[-2:] == [4, 4]


def test_what_is_urgent_comes_first_however_little_it_adds() -> None:
    cases = [case_of(name) for name in NAMES]

    def urgency(case: Case) -> tuple[bool, ...]:
        return case.id == "ddp-4-lora", case.id == "ddp-2"

    ordered = [valued.case.id for valued in order_by_value(cases, urgency, one_second)]
    assert ordered[:2] == ["ddp-4-lora", "ddp-2"]


def test_the_order_does_not_depend_on_that_of_the_cases() -> None:
    cases = [case_of(name) for name in NAMES]
    forward = order_by_value(cases, equally_urgent, one_second)
    assert forward == order_by_value(cases[::-1], equally_urgent, one_second)


def test_no_cases_have_no_order() -> None:
    assert order_by_value([], equally_urgent, one_second) == []
