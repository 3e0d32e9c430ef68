// One dashboard, drawn with Grafana's own components from data that render.py has put into window.board.
import { createRoot } from "react-dom/client";
import { createTheme, dateTime, FieldType, getDisplayProcessor, getFieldDisplayValues, ThemeContext, toDataFrame } from "@grafana/data";
import { BarGauge, BigValue, BigValueColorMode, BigValueGraphMode, PanelChrome, TimeSeries } from "@grafana/ui";

const theme = createTheme({ colors: { mode: "dark" } });
const { board, data, from, to } = window.board;
const CELL = [window.innerWidth / 24, 34], GAP = 8;

function name(pattern, labels) {
  return pattern ? pattern.replace(/\{\{(\w+)\}\}/g, (_, key) => labels[key] ?? "") : Object.values(labels).join(" ") || "value";
}

function frames(panel) { // Prometheus's answers as Grafana's data frames, with the panel's field options applied
  const found = panel.targets.flatMap((target, i) => data[panel.id][i].map((series) => [target, series]));
  return found.map(([target, series], index) => {
    const color = { mode: panel.type === "timeseries" ? "palette-classic" : "thresholds" };
    const config = { ...panel.fieldConfig.defaults, color, displayNameFromDS: name(target.legendFormat, series.metric) };
    const frame = toDataFrame({ refId: target.refId, fields: [
      { name: "Time", type: FieldType.time, values: series.values.map(([at]) => at * 1000), config: {} },
      { name: "Value", type: FieldType.number, values: series.values.map(([, value]) => Number(value)), labels: series.metric, config },
    ] });
    for (const field of frame.fields) {
      field.state = { seriesIndex: index };
      field.display = getDisplayProcessor({ field, theme, timeZone: "utc" });
    }
    return frame;
  });
}

function Content({ panel, width, height }) {
  const shown = frames(panel);
  if (shown.length === 0) return <div className="nodata" style={{ padding: 16 }}>No data</div>;
  if (panel.type === "timeseries")
    return <TimeSeries frames={shown} structureRev={1} width={width} height={height} timeZone="utc"
      timeRange={{ from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: "now-5m", to: "now" } }}
      legend={{ ...panel.options.legend }} options={panel.options} />;
  const values = getFieldDisplayValues({ fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text, data: shown, theme, sparkline: true, timeZone: "utc" });
  if (panel.type === "bargauge")
    return <div>{values.map((item, i) => <BarGauge key={i} theme={theme} width={width} height={Math.min(36, height / values.length)}
      orientation="horizontal" display={item.display} value={item.display} field={item.field} displayMode="gradient" itemSpacing={8} />)}</div>;
  if (values.length === 1) values[0].display.title = undefined;
  const each = width / values.length;
  return <div style={{ display: "flex" }}>{values.map((item, i) => <BigValue key={i} theme={theme} width={each} height={height}
    value={item.display} sparkline={item.sparkline} colorMode={BigValueColorMode.Value} graphMode={BigValueGraphMode.Area} />)}</div>;
}

function Board() {
  return <ThemeContext.Provider value={theme}>
    <h2 style={{ margin: 12, color: "#ccccdc" }}>{board.title}</h2>
    {board.panels.map((panel) => {
      const { x, y, w, h } = panel.gridPos, width = w * CELL[0] - GAP, height = h * CELL[1] - GAP;
      return <div key={panel.id} style={{ position: "absolute", left: x * CELL[0] + GAP / 2, top: 56 + y * CELL[1], width, height }}>
        <PanelChrome title={panel.title} width={width} height={height}>
          {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} />}
        </PanelChrome>
      </div>;
    })}
  </ThemeContext.Provider>;
}

const style = document.createElement("style"); // what Grafana's own page sets for all of them
style.textContent = "button { color: inherit; background: none; border: 0; font: inherit; padding: 0 } * { scrollbar-width: none }";
document.head.append(style);
document.body.style.cssText = "background: #111217; color: #ccccdc; font-family: Inter, sans-serif; margin: 0";
createRoot(document.getElementById("root")).render(<Board />);
window.isDrawn = true;
