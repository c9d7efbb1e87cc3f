// <plot-figure data-source="id of a JSON script">: draws on connect, purges on disconnect, follows width and theme.
// Colours arrive as `var(--name)` or `var(--name)/0.2` and are resolved here, so one figure serves both themes.

import { $, readJson } from "./dom.js";

let library = null;
function plotly() {
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = $('meta[name="plotly-src"]').content;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("the chart library did not load"));
    document.head.append(script);
  });
  return library;
}

const COLOUR = /^var\((--[\w-]+)\)(?:\/([\d.]+))?$/;
function resolver(host) {
  const probe = document.createElement("span");
  probe.hidden = true;
  host.append(probe);
  const known = new Map();
  const colour = (text) => {
    if (known.has(text)) return known.get(text);
    const [, name, alpha] = text.match(COLOUR);
    probe.style.color = `var(${name})`;
    let value = getComputedStyle(probe).color;
    if (alpha !== undefined) value = `rgba(${value.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${alpha})`;
    known.set(text, value);
    return value;
  };
  const walk = (value) => {
    if (typeof value === "string") return COLOUR.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.map(walk);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, walk(v)]));
    return value;
  };
  return { walk, done: () => probe.remove() };
}

const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };

class PlotFigure extends HTMLElement {
  connectedCallback() {
    this.payload = readJson(this.dataset.source);
    if (!this.payload?.figure) return;
    this.onTheme = () => this.draw();
    this.media = matchMedia("(prefers-color-scheme: dark)");
    document.addEventListener("themechange", this.onTheme);
    this.media.addEventListener("change", this.onTheme);
    this.ready = this.draw().then(() => this.follow()).catch((error) => this.explain(error));
  }

  disconnectedCallback() {
    document.removeEventListener("themechange", this.onTheme);
    this.media?.removeEventListener("change", this.onTheme);
    this.observer?.disconnect();
    if (this.canvas) window.Plotly?.purge(this.canvas);
    this.canvas = null;
  }

  async draw() {
    const Plotly = await plotly();
    if (!this.isConnected) return;
    if (!this.canvas) {
      this.canvas = document.createElement("div");
      this.canvas.className = "plot-canvas";
      this.replaceChildren(this.canvas);
    }
    const colours = resolver(this);
    const figure = colours.walk(this.payload.figure);
    this.lookup = colours.walk;
    colours.done();
    const size = { width: this.clientWidth, height: this.clientHeight, autosize: false };
    if (size.width > 0) await Plotly.react(this.canvas, figure.data, { ...figure.layout, ...size }, CONFIG);
    this.dataset.drawn = "";
  }

  follow() {
    let width = this.clientWidth, asked = 0;
    this.observer = new ResizeObserver(() => {
      // Only a change of width, once per frame: drawing changes the height and would call us again.
      if (Math.abs(this.clientWidth - width) < 2 || !this.clientWidth) return;
      cancelAnimationFrame(asked);
      asked = requestAnimationFrame(() => {
        width = this.clientWidth;
        if (this.canvas) this.draw();
      });
    });
    this.observer.observe(this);
  }

  // Adds one point to trace `index`. `patch` maps attribute names ("x", "marker.symbol") to one value each.
  async extend(index, patch) {
    const raw = this.payload.figure.data[index];
    for (const [path, value] of Object.entries(patch)) {
      const keys = path.split(".");
      const last = keys.pop();
      const holder = keys.reduce((at, key) => at[key], raw);
      (holder[last] ??= []).push(value);
    }
    await this.ready;
    if (!this.canvas) return;
    const many = Object.fromEntries(Object.entries(patch).map(([k, v]) => [k, [[v]]]));
    window.Plotly.extendTraces(this.canvas, many, [index]);
    if (raw.showlegend === false && "showlegend" in raw) {
      raw.showlegend = true;
      window.Plotly.restyle(this.canvas, { showlegend: true }, [index]);
    }
  }

  async png() {
    await this.ready;
    const colours = resolver(this);
    const figure = colours.walk(this.payload.figure);
    const surface = colours.walk("var(--surface)");
    colours.done();
    const layout = { ...figure.layout, paper_bgcolor: surface, plot_bgcolor: surface };
    return window.Plotly.toImage({ data: figure.data, layout }, { format: "png", width: 960, height: 480, scale: 2 });
  }

  explain(error) {
    const note = document.createElement("p");
    note.className = "fallback";
    note.textContent = `The picture could not be drawn (${error.message}). The same data is in the table.`;
    this.replaceChildren(note);
  }
}
customElements.define("plot-figure", PlotFigure);

function save(href, name) {
  const link = Object.assign(document.createElement("a"), { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

function csv({ columns, rows }) {
  const cell = (value) => {
    const text = value == null ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-chart-table], [data-chart-csv], [data-chart-png]");
  if (!button) return;
  const figure = $("plot-figure", button.closest(".chart"));
  if ("chartTable" in button.dataset) {
    const table = document.getElementById(button.getAttribute("aria-controls"));
    table.hidden = !table.hidden;
    button.setAttribute("aria-expanded", String(!table.hidden));
  } else if ("chartCsv" in button.dataset) {
    const url = URL.createObjectURL(new Blob([csv(figure.payload)], { type: "text/csv" }));
    save(url, `${figure.dataset.name}.csv`);
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } else {
    save(await figure.png(), `${figure.dataset.name}.png`);
  }
});
