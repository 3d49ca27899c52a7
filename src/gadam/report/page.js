"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const form = document.getElementById("controls");
  const dark = () => root.dataset.theme === "dark";
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = 560;  // pixels of a chart below which it shows less

  const checked = (name) =>
    [...document.querySelectorAll(`input[name="${name}"]:checked`)].map((i) => i.value);
  const state = () => ({
    methods: new Set(checked("method")), points: new Set(checked("point")),
    x: checked("x")[0], y: checked("y")[0], split: checked("split")[0] || data.splits[0],
  });

  // ------------------------------------------------------------------------------------ charts

  const config = () => {
    const css = getComputedStyle(root);
    const color = (name) => css.getPropertyValue(name).trim();
    const [ink, soft, line] = [color("--ink"), color("--soft"), color("--line")];
    return {
      background: "transparent", view: { stroke: null }, font: "system-ui, sans-serif",
      axis: {
        labelColor: ink, titleColor: soft, gridColor: line, domainColor: line, tickColor: line,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8,
      },
      axisY: { domain: false, ticks: false },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 12.5, rowPadding: 4 },
    };
  };

  const embed = async (id, spec) => {
    const box = document.getElementById(id);
    if (!box) return;  // the page has no runs
    try {
      const themed = { ...spec, config: { ...config(), ...spec.config } };
      await vegaEmbed(box, themed, { actions: false, renderer: "svg" });
    } catch (error) {
      box.textContent = `This chart could not be drawn: ${error.message}`;
    }
    box.dataset.ready = String((Number(box.dataset.ready) || 0) + 1);
  };
  const width = (id) => document.getElementById(id)?.clientWidth || 0;

  // Legends wrap to the width of their chart.
  const fitLegends = (spec, id) => {
    const columns = width(id) < 480 ? 3 : 6;
    for (const layer of spec.layer || [spec])
      for (const channel of Object.values(layer.encoding))
        if (channel.legend && channel.legend.columns) channel.legend.columns = columns;
    return spec;
  };

  const drawGains = (panel, id) => {
    const spec = structuredClone(panel.spec);
    if (width(id) < narrow) spec.layer = spec.layer.filter((l) => l.name !== "numbers");
    return embed(id, spec);
  };

  const drawCurves = (panel, id, s) => {
    let shown = panel.curves
      .filter((c) => s.methods.has(c.name) && s.points.has(c.point) && c.split === s.split)
      .flatMap((c) => c.epoch.map((epoch, i) => ({
        name: c.name, point: c.point, epoch, seconds: c.seconds[i], value: c.value[i],
        low: c.low[i], high: c.high[i], seeds: c.seeds[i],
      })));
    if (s.y === "log") {  // a logarithmic axis cannot show zero
      shown = shown.filter((r) => r.value > 0);
      const least = Math.min(...shown.map((r) => r.value)) / 2;
      shown = shown.map((r) => ({ ...r, low: Math.max(r.low, least) }));
    }
    const spec = fitLegends(structuredClone(panel.spec), id);
    const title = panel.titles[s.split];
    const floor = panel.floors[s.split];
    spec.datasets = { curves: shown, floor: [{ value: floor }] };
    if (floor === undefined || !shown.length) spec.layer = spec.layer.filter((l) => !l.data);
    for (const layer of spec.layer) {
      if (layer.encoding.x) {
        layer.encoding.x.field = s.x;
        layer.encoding.x.title = s.x === "epoch" ? "epochs" : "seconds";
      }
      layer.encoding.y.title = title;
      for (const tip of layer.encoding.tooltip || [])
        if (tip.field === "value") tip.title = tip.title || title;
      layer.encoding.y.scale = { type: s.y, zero: false };
    }
    return embed(id, spec);
  };

  const drawRates = (panel, id, s) => {
    const spec = fitLegends(structuredClone(panel.spec), id);
    const rates = panel.rates.filter((r) => s.methods.has(r.name));
    spec.datasets = {
      rates: rates.flatMap((r) =>
        r.rate.map((rate, epoch) => ({ name: r.name, epoch, rate })).filter((p) => p.rate > 0)),
      starts: rates.filter((r) => r.start !== null).map((r) => ({ name: r.name, epoch: r.start })),
    };
    const logs = spec.datasets.rates.map((r) => Math.log10(r.rate));
    const [low, high] = [Math.floor(Math.min(...logs)), Math.ceil(Math.max(...logs))];
    if (high - low > 1 && high - low < 12)  // grid lines only at powers of ten
      spec.layer[0].encoding.y.axis.values =
        Array.from({ length: high - low + 1 }, (_, i) => Number(`1e${low + i}`));
    return embed(id, spec);
  };

  const drawCosts = (panel, id, s) => {
    const spec = structuredClone(panel.spec);
    spec.datasets = {
      costs: panel.costs.filter((c) => s.methods.has(c.name)).flatMap((c) =>
        Object.entries(c.seconds)
          .map(([activity, seconds]) => ({ name: c.name, activity, seconds }))),
    };
    return embed(id, spec);
  };

  const drawAll = (kind, drawPanel) =>
    (data.panels[kind] || []).map((panel, i) => drawPanel(panel, `${kind}-${i}`, state()));
  const drawChosen = () => Promise.all([
    ...drawAll("curves", drawCurves), ...drawAll("rates", drawRates), ...drawAll("costs", drawCosts),
  ]);
  const draw = () => Promise.all([
    ...drawAll("gains", drawGains), drawChosen(),
    ...data.sections.map((spec, i) => embed(`section-chart-${i}`, spec)),
  ]);

  // ------------------------------------------------------------------------------------- theme

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

  // ---------------------------------------------------------------------------------- controls

  form?.addEventListener("submit", (e) => e.preventDefault());
  form?.addEventListener("change", drawChosen);
  for (const all of form?.querySelectorAll("button[data-all]") || [])
    all.addEventListener("click", () => {
      for (const box of form.querySelectorAll('input[name="method"]'))
        box.checked = all.dataset.all === "true";
      drawChosen();
    });
  let lastWidth = innerWidth, resizing = 0;
  addEventListener("resize", () => {  // legends and numbers depend on the width
    if (innerWidth === lastWidth) return;
    lastWidth = innerWidth;
    clearTimeout(resizing);
    resizing = setTimeout(draw, 200);
  });

  // -------------------------------------------------------------------------------------- live

  const inputs = () => [...(form?.querySelectorAll("input") || [])];
  const inputKey = (i) => `${i.name}=${i.value}`;
  const kept = () => [...document.querySelectorAll("details[data-keep]")];
  // What the reader sees: the last heading that has been reached, and where it is on the screen.
  const place = () => {
    const headings = [...document.querySelectorAll("h2[id]")]
      .map((h) => ({ id: h.id, top: h.getBoundingClientRect().top }));
    return headings.filter((h) => h.top < innerHeight / 2).pop() || null;
  };
  const returnTo = (place) => {
    const heading = place && document.getElementById(place.id);
    if (heading) scrollBy(0, heading.getBoundingClientRect().top - place.top);
  };
  const save = () => sessionStorage.setItem("page", JSON.stringify({
    inputs: Object.fromEntries(inputs().map((i) => [inputKey(i), i.checked])),
    open: kept().filter((d) => d.open).map((d) => d.dataset.keep),
    place: place(),
  }));
  const restore = () => {
    const saved = JSON.parse(sessionStorage.getItem("page") || "null");
    if (!saved) return null;
    for (const i of inputs()) if (inputKey(i) in saved.inputs) i.checked = saved.inputs[inputKey(i)];
    for (const d of kept()) d.open = saved.open.includes(d.dataset.keep);
    return saved.place;
  };
  let reading = null;
  if (data.live) {
    reading = restore();
    history.scrollRestoration = "manual";
    addEventListener("pagehide", save);
    setInterval(async () => {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (answer.ok && (await answer.text()) !== data.live) location.reload();
      } catch { /* the server stopped: keep the page */ }
    }, 5000);
  }
  draw().then(() => {
    returnTo(reading);
    document.body.dataset.drawn = "true";
  });
})();
