"""Boards against the real tools: promtool parses every query, TypeScript checks every panel against Grafana's own types."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dashboards import build, lint
from dashboards.widgets import to_json
from tests.integration import npm

if TYPE_CHECKING:
    from pathlib import Path

BOARDS = {board.uid: to_json(board) for board in build.BOARDS}

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
"""Grafana's types of the version that deploy/compose.yaml starts, and a compiler."""

TYPES = """\
import type * as s from '@grafana/schema';
import type { Options as TimeSeries } from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { Options as Stat } from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type { Options as BarGauge } from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type { Options as Table, FieldConfig as TableField } from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type { Options as States, FieldConfig as StatesField } from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type { Options as Heatmap, FieldConfig as HeatmapField } from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';

// JSON has no enums: a string enum is read as the set of its values.
type Plain<T> = T extends string ? (string extends T ? string : `${T}`)
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[]
  : unknown extends T ? any
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;

interface Target {
  refId: string; datasource: { type: string; uid: string }; expr: string; legendFormat: string;
  editorMode: 'code' | 'builder'; format: 'time_series' | 'table' | 'heatmap'; instant: boolean; range: boolean;
}
type Of<K extends string, O, C> = Omit<Plain<s.Panel>, 'type' | 'options' | 'fieldConfig' | 'targets' | 'transformations'> & {
  type: K; options: Plain<O>; targets: Target[];
  transformations?: { id: 'merge' | 'organize'; options: Record<string, unknown> }[];
  fieldConfig: {
    defaults: Omit<Plain<s.FieldConfig>, 'custom' | 'mappings'> & { custom: Plain<C>; mappings: Mapping[] };
    overrides: { matcher: { id: string; options: string }; properties: { id: string; value: any }[] }[];
  };
};
type Mapping = { type: 'value'; options: Record<string, { text: string; color: string; index: number }> };
type Empty = Record<string, never>;
type Row = Omit<Plain<s.RowPanel>, 'panels'> & { panels: never[] };
type Panel = Row
  | Of<'timeseries', TimeSeries, s.GraphFieldConfig> | Of<'stat', Stat, Empty> | Of<'bargauge', BarGauge, Empty>
  | Of<'table', Table, TableField> | Of<'state-timeline', States, StatesField> | Of<'heatmap', Heatmap, HeatmapField>;

// What Prometheus' plugin reads beside the common fields of an annotation.
interface Marks { expr?: string; step?: string; titleFormat?: string; textFormat?: string; tagKeys?: string; useValueForTime?: boolean }
type Variable = Omit<Plain<s.VariableModel>, 'current' | 'query'> & {
  definition?: string; query: string | { qryType: number; query: string; refId: string };
  current: Empty | { selected: boolean; text: string[]; value: string[] } | { text: string; value: string };
};
export type Board = Omit<Plain<s.Dashboard>, 'panels' | 'templating' | 'annotations'> & {
  panels: Panel[]; templating: { list: Variable[] };
  annotations: { list: (Omit<Plain<s.AnnotationQuery>, 'target'> & Marks)[] };
};
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiler and Grafana's types."""
    return npm.installed(PACKAGES, tmp_path_factory.mktemp("npm"))


def compile_boards(packages: Path, folder: Path, boards: dict[str, dict[str, Any]]) -> str:
    """Return the compiler's errors; empty if every dashboard has the types that Grafana defines."""
    (folder / "types.ts").write_text(TYPES)
    for uid, board in boards.items():
        text = json.dumps(board, ensure_ascii=False)
        (folder / f"{uid}.ts").write_text(
            f"import type {{ Board }} from './types.js';\nexport const board: Board = {text};\n"
        )
    return npm.typescript(packages, folder)


def test_boards_have_grafanas_own_types(packages: Path, tmp_path: Path) -> None:
    assert compile_boards(packages, tmp_path, BOARDS) == ""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: .ci/install-test-tools")
def test_promtool_parses_every_query(tmp_path: Path) -> None:
    seen = []
    for uid, board in BOARDS.items():
        for i, (_, expr) in enumerate(lint.queries(board)):
            plain = re.sub(r"\$__(rate_interval|range|interval)\b", "5m", expr.replace("$__range_s", "300"))
            plain = re.sub(r"\$price_\w+", "2.5", plain)
            plain = re.sub(r"\$\{?\w+\}?", ".+", plain)
            seen.append({"record": f"board:{uid.replace('-', '_')}:{i}", "expr": plain})
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": seen}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(seen)} rules found" in done.stdout
