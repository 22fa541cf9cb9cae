"""Factories, and imports without garbage collections."""

from __future__ import annotations

import gc

import pytest

from actors.runtime.factory import Factory, quick_imports


def test_factory_makes_the_object_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_THE_FACTORY", raising=False)
    made = Factory("os:getenv", {"key": "OF_THE_FACTORY"}, {"OF_THE_FACTORY": "set"}).make()
    assert made == "set"


def test_collections_are_paused_during_imports_only() -> None:
    with pytest.raises(ModuleNotFoundError), quick_imports():
        assert not gc.isenabled()
        with quick_imports():
            pass
        assert not gc.isenabled(), "the inner block leaves it as it was"
        Factory("no_such_module:function", {}).make()
    assert gc.isenabled()
