"""How the page looks in light and dark, and the few lines that read a chart under the pointer."""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f6; --card: #ffffff; --ink: #1b2422; --soft: #5b6865; --hair: #dfe5e3; --accent: #0f766e;
  --note: #fdf6e3; --note-ink: #6b4e0a;
  --c1: #0f766e; --c2: #b45309; --c3: #1d4ed8; --c4: #be123c; --c5: #7c3aed; --c6: #4d7c0f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #101615; --card: #18201f; --ink: #e6ecea; --soft: #9aa8a4; --hair: #2b3634; --accent: #2dd4bf;
    --note: #2a2413; --note-ink: #f0d48a;
    --c1: #2dd4bf; --c2: #f5a742; --c3: #7aa8ff; --c4: #fb7185; --c5: #b79bff; --c6: #a3d94a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1560px; margin: 0 auto; padding: 28px clamp(14px, 3vw, 40px) 40px; }
header { display: flex; gap: 14px; align-items: center; }
header svg { flex: none; width: 44px; height: 44px; fill: none; stroke: var(--accent); stroke-width: 2.5; }
h1 { margin: 0; font-size: 24px; line-height: 1.25; overflow-wrap: anywhere; }
header p { margin: 2px 0 0; color: var(--soft); }
h2 { margin: 36px 0 12px; font-size: 17px; }
h2 + p { margin: -6px 0 12px; color: var(--soft); max-width: 100ch; text-wrap: pretty; }
.state { font-size: 12px; padding: 2px 9px; border: 1px solid currentColor; border-radius: 99px;
  color: var(--accent); vertical-align: 4px; margin-left: 6px; white-space: nowrap; }
.state.open { color: var(--c2); }
.tiles { display: grid; gap: 12px; margin: 22px 0 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); }
.tiles div { background: var(--card); border: 1px solid var(--hair); border-radius: 10px;
  padding: 12px 15px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 20px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles small { display: block; color: var(--soft); font-size: 12px; font-weight: 400; }
.notes { margin: 18px 0 0; padding: 10px 16px 10px 32px; border-radius: 10px; background: var(--note);
  color: var(--note-ink); }
.cards { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); }
.card { margin: 0; min-width: 0; background: var(--card); border: 1px solid var(--hair); border-radius: 10px;
  padding: 13px 15px 10px; position: relative; display: flex; flex-direction: column; }
figcaption small { color: var(--soft); font-size: 13px; margin-left: 4px; }
.legend { margin: 3px 0 0; font-size: 13px; color: var(--soft); display: flex; flex-wrap: wrap;
  gap: 2px 14px; }
.key { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  background: currentColor;
  vertical-align: middle; }
.key.band { height: 10px; opacity: .22; }
.key.dashed { background: none; border-top: 2px dashed var(--soft); height: 0; border-radius: 0; }
.chart { display: block; width: 100%; height: auto; margin-top: auto; padding-top: 6px; touch-action: pan-y; }
.readout { position: absolute; right: 14px; top: 12px; margin: 0; padding: 2px 9px; border-radius: 6px;
  font-size: 13px; background: var(--ink); color: var(--card); opacity: 0; pointer-events: none;
  font-variant-numeric: tabular-nums; max-width: calc(100% - 28px); }
.reading .readout { opacity: 1; }
.empty { color: var(--soft); margin: 0; padding: 26px 0; text-align: center; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
@media (max-width: 480px) { .chart text { font-size: 14.5px; } .card { padding: 12px 11px 8px; } }
svg text.lane { fill: var(--ink); }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.rule { stroke: var(--hair); } .axis { stroke: var(--soft); }
.dot { fill: currentColor; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.band { fill: currentColor; opacity: .18; }
.reference { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
.cursor { stroke: var(--soft); opacity: 0; } .reading .cursor { opacity: 1; }
.strip { display: block; } .strip rect { fill: currentColor; opacity: .82; } .strip rect:hover { opacity: 1; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--hair); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 15px; text-align: right; white-space: nowrap; border-top: 1px solid var(--hair); }
thead th { border: 0; color: var(--soft); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child { text-align: left; font-weight: 500; }
.bar { display: inline-block; width: 90px; height: 9px; margin-left: 10px; border-radius: 3px;
  background: var(--hair); text-align: left; vertical-align: middle; }
.bar i { display: block; background: currentColor; height: 9px; border-radius: 3px; }
.pair { display: grid; gap: 14px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 370px), 1fr)); }
.pair td { white-space: normal; overflow-wrap: anywhere; } .pair tr:first-child > * { border-top: 0; }
pre { margin: 0; padding: 14px 16px; overflow-x: auto; font: 13px/1.55 ui-monospace, monospace;
  background: var(--card); border: 1px solid var(--hair); border-radius: 10px; }
footer { margin-top: 36px; color: var(--soft); font-size: 13px; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
"""

SCRIPT = """
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const [axis, series] = JSON.parse(svg.dataset.points);
  const card = svg.parentElement;
  const cursor = svg.querySelector(".cursor"), readout = card.querySelector(".readout");
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const found = series.map(([name, points]) => [name, nearest(points, x)]);
    const closest = nearest(found.map(([, point]) => point), x);
    cursor.setAttribute("x1", closest[0]);
    cursor.setAttribute("x2", closest[0]);
    const same = found.filter(([, point]) => Math.abs(point[0] - closest[0]) < 6);
    readout.textContent = axis + " " + closest[1] + ": " +
      same.map(([name, point]) => series.length > 1 ? name + " " + point[2] : point[2]).join(", ");
    card.classList.add("reading");
  });
  svg.addEventListener("pointerleave", () => card.classList.remove("reading"));
}
"""
