// Small helpers that several modules share.

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

const icons = $("svg.icon use")?.getAttribute("href").split("#")[0] || "/static/icons.svg";

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `${icons}#${name}`);
  svg.append(use);
  return svg;
}

export const atEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < 40;

export function readJson(id) {
  const element = document.getElementById(id);
  return element ? JSON.parse(element.textContent) : null;
}

export function csrf() {
  return JSON.parse(document.body.getAttribute("hx-headers") || "{}")["x-csrftoken"] || "";
}

export function announce(text) {
  let region = $("#announcer");
  if (!region) {
    region = Object.assign(document.createElement("div"), { id: "announcer", className: "sr-only" });
    region.setAttribute("role", "status");
    document.body.append(region);
  }
  if (region.textContent !== text) region.textContent = text;
}

export const fmt = {
  significant(value, digits = 3) {
    if (value === 0) return "0";
    const places = Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
    return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  },
  duration(seconds) {
    if (seconds == null || !isFinite(seconds)) return "–";
    const s = Math.round(seconds);
    if (s < 60) return `${s} s`;
    const two = (n) => String(n).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)} min ${two(s % 60)} s` : `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
  },
  times: (ratio) => (ratio == null ? "–" : `${ratio.toFixed(2)}×`),
  interval: (low, high) => (low == null || high == null ? "" : `${low.toFixed(2)}–${high.toFixed(2)}×`),
  percent: (share) => (share == null ? "–" : `${Math.round(share * 100)}%`),
  clock: (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false }),
};
