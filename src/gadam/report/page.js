"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme === "dark";
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  const rows = data.curves.flatMap((c) => c.epoch.map((epoch, i) => ({
    label: c.label, point: c.point, metric: c.metric, split: c.split,
    style: `${c.label} ${c.point}`, epoch, seconds: c.seconds[i], value: c.value[i],
    low: c.low[i], high: c.high[i], seeds: c.seeds[i],
  })));

  const checked = (name) =>
    [...document.querySelectorAll(`input[name="${name}"]:checked`)].map((i) => i.value);
  const state = () => ({
    labels: new Set(checked("method")), points: new Set(checked("point")),
    x: checked("x")[0], y: checked("y")[0],
    split: checked("split")[0] || Object.keys(data.titles)[0],
    metric: checked("metric")[0] || Object.keys(Object.values(data.titles)[0] || {})[0],
  });

  const config = () => {
    const ink = getComputedStyle(root).getPropertyValue("--ink").trim();
    const line = getComputedStyle(root).getPropertyValue("--line").trim();
    return {
      background: "transparent", view: { stroke: null }, font: "system-ui, sans-serif",
      axis: {
        labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500,
      },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 12 },
    };
  };

  const embed = async (id, spec) => {
    const box = document.getElementById(id);
    if (!box) return;  // the page has no runs
    try {
      const themed = { ...spec, config: { ...spec.config, ...config() } };
      await vegaEmbed(box, themed, { actions: false, renderer: "svg" });
    } catch (error) {
      box.textContent = `This chart could not be drawn: ${error.message}`;
    }
    box.dataset.ready = String((Number(box.dataset.ready) || 0) + 1);
  };

  const drawCurves = () => {
    const s = state();
    let shown = rows.filter((r) => s.labels.has(r.label) && s.points.has(r.point)
      && r.metric === s.metric && r.split === s.split);
    if (s.y === "log") {  // a logarithmic axis cannot show zero
      shown = shown.filter((r) => r.value > 0);
      const least = Math.min(...shown.map((r) => r.value)) / 2;
      shown = shown.map((r) => ({ ...r, low: Math.max(r.low, least) }));
    }
    const spec = structuredClone(data.specs.curves);
    const title = (data.titles[s.split] || {})[s.metric];
    const floor = (data.floors[s.split] || {})[s.metric];
    spec.datasets = { curves: shown, floor: [{ value: floor }] };
    if (floor === undefined || !shown.length) spec.layer = spec.layer.filter((l) => !l.data);
    for (const layer of spec.layer) {
      if (layer.encoding.x) {
        layer.encoding.x.field = s.x;
        layer.encoding.x.title = s.x;
      }
      layer.encoding.y.title = title;
      for (const tip of layer.encoding.tooltip || [])
        if (tip.field === "value") tip.title = tip.title || title;
      layer.encoding.y.scale = { type: s.y, zero: false };
    }
    return embed("curves", spec);
  };

  const drawRates = () => {
    const s = state();
    const spec = structuredClone(data.specs.rates);
    const rates = data.rates.filter((r) => s.labels.has(r.label));
    spec.datasets = {
      rates: rates.flatMap((r) =>
        r.rate.map((rate, epoch) => ({ label: r.label, epoch, rate })).filter((p) => p.rate > 0)),
      starts: rates.filter((r) => r.start !== null)
        .map((r) => ({ label: r.label, epoch: r.start })),
    };
    return embed("rates", spec);
  };

  const drawCosts = () => {
    const s = state();
    const spec = structuredClone(data.specs.costs);
    const costs = data.costs.filter((c) => s.labels.has(c.label));
    spec.height = 24 * Math.max(1, costs.length) + 50;
    spec.datasets = {
      costs: costs.flatMap((c) =>
        Object.entries(c.seconds)
          .map(([activity, seconds]) => ({ label: c.label, activity, seconds }))),
    };
    return embed("costs", spec);
  };

  const drawSections = () =>
    Promise.all(data.sections.map((spec, i) => embed(`section-chart-${i}`, spec)));
  const draw = () => Promise.all([drawCurves(), drawRates(), drawCosts(), drawSections()]);

  const setTheme = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-pressed", String(theme === "dark"));
  };
  const preferred = (query) => (query.matches ? "dark" : "light");
  setTheme((data.live && sessionStorage.getItem("theme")) || preferred(prefersDark));
  // Print in light colors, with all details open.
  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    for (const d of document.querySelectorAll("details")) d.open = true;
    if (before === "dark") { setTheme("light"); draw(); }
  });
  addEventListener("afterprint", () => { if (before === "dark") { setTheme("dark"); draw(); } });
  prefersDark.addEventListener("change", (e) => { setTheme(preferred(e)); draw(); });
  button.addEventListener("click", () => {
    setTheme(dark() ? "light" : "dark");
    sessionStorage.setItem("theme", root.dataset.theme);
    draw();
  });

  const form = document.getElementById("controls");
  form?.addEventListener("submit", (e) => e.preventDefault());
  form?.addEventListener("change", () => draw());
  for (const all of form?.querySelectorAll("button[data-all]") || [])
    all.addEventListener("click", () => {
      for (const box of form.querySelectorAll('input[name="method"]'))
        box.checked = all.dataset.all === "true";
      draw();
    });

  if (data.live && form) {
    // Keep the user's choices across reloads.
    const inputs = [...form.querySelectorAll("input")];
    const key = (i) => `${i.name}=${i.value}`;
    const saved = JSON.parse(sessionStorage.getItem("controls") || "{}");
    for (const i of inputs) if (key(i) in saved) i.checked = saved[key(i)];
    const save = () => {
      const choices = Object.fromEntries(inputs.map((i) => [key(i), i.checked]));
      sessionStorage.setItem("controls", JSON.stringify(choices));
    };
    form.addEventListener("change", save);
    form.addEventListener("click", save);
    setInterval(async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok && (await answer.text()) !== data.live) location.reload();
      } catch { /* the server stopped: keep the page */ }
    }, 5000);
  }
  draw().then(() => { document.body.dataset.drawn = "true"; });
})();
