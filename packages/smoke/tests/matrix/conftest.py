import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--coverage", default="pairwise", help="one, pairwise or full")
    parser.addoption("--cards", default=4, type=int, help="most ranks of a case")
    parser.addoption("--device", default="cpu", help="where to train, as in a RUN")
