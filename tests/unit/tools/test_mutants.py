"""The mutation gate: which changes it makes, that each is one change, and that its list of equivalent ones holds."""

from __future__ import annotations

import ast

import mutants
from mutant_sites import find_sites, mutate

SOURCE = '''
class Side:
    def take(self, record, grant):
        """Not a site."""
        log.info("nor %s", grant)
        if record is None or record.grant != grant > 0:
            self.late_total["grant"] += 1
            return
        record.seen = max(record.seen, grant)
        self.send(record)

def table():
    rows = {(state.A, event.X): Row(state.B, (effect.ONE, effect.TWO))}
    return rows
'''


def _texts() -> dict[str, str]:
    sites = find_sites(SOURCE)
    return {site.name: ast.unparse(mutate(SOURCE, number)) for number, site in enumerate(sites)}


def test_guards_comparisons_rows_and_effects_are_sites_and_counters_and_logs_are_not() -> None:
    kinds = {site.kind for site in find_sites(SOURCE)}
    assert kinds == {"guard", "boundary", "comparison", "bound", "effect", "row", "row effect"}
    assert not [name for name in _texts() if "late_total" in name or "log." in name]


def test_each_is_another_change_and_has_a_name_of_its_own() -> None:
    texts = _texts()
    assert len(texts) == len(find_sites(SOURCE))
    assert len(set(texts.values()) | {ast.unparse(ast.parse(SOURCE))}) == len(texts) + 1


def test_a_guard_is_forced_both_ways_and_loses_each_of_its_parts() -> None:
    texts = "\n".join(_texts().values())
    for guard in ("if False:", "if True:", "if record.grant != grant > 0:", "if record is None:"):
        assert guard in texts


def test_a_row_is_dropped_stays_and_loses_each_effect() -> None:
    texts = "\n".join(_texts().values())
    for row in ("{}", "Row(state.A, (effect.ONE, effect.TWO))", "Row(state.B, (effect.TWO,))", "Row(state.B, (effect.ONE,))"):
        assert f"rows = {row}" in texts or f"(state.A, event.X): {row}" in texts


def test_every_module_of_the_protocol_has_hundreds_and_every_equivalent_one_is_among_them() -> None:
    every = {mutant.name for mutant in mutants._all_mutants(mutants._modules())}
    assert len(every) > 2000
    assert set(mutants._equivalent()) <= every
