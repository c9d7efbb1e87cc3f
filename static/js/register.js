// Registering: the name in requests follows the name until it is typed by hand; the cost table follows the price.

import { $, $$, fmt } from "./dom.js";

const form = $("#endpoint-form");
const { name, slug, price_per_hour: price } = form.elements;
const slugify = (text) => text.toLowerCase().normalize("NFKD").replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60);
let own = Boolean(slug.value);
slug.addEventListener("input", () => { own = Boolean(slug.value); });
name.addEventListener("input", () => { if (!own) slug.value = slugify(name.value); });

function costs() {
  const perHour = Number(price.value);
  $("#cost-price").textContent = isFinite(perHour) && price.value !== "" ? `$${perHour.toFixed(2)}` : "…";
  for (const row of $$("#cost-table [data-tput]")) {
    const cost = (perHour / (Number(row.dataset.tput) * 3600)) * 1e6;
    $("[data-cost]", row).textContent = isFinite(cost) ? `$${fmt.significant(cost)}` : "–";
  }
}
price.addEventListener("input", costs);
costs();
