// The HTML report. Its data is embedded in the page, so nothing is fetched.
import { el, fill } from "./dom.js";
import { showComparison } from "./comparison.js";
import { showRun } from "./run.js";
import { restoreNonFinite } from "./json.js";
import { themeButton } from "./theme.js";

const data = restoreNonFinite(JSON.parse(document.getElementById("data").textContent));
const place = document.getElementById("page");
const shown = data.runs ? showComparison(place, data) : showRun(place, data);
const redraw = (theme) => {
  shown.settings.theme = theme;
  shown.settings.redraw();
};
fill(
  document.getElementById("bar"),
  el("span", { class: "brand" }, "whet"),
  el("span", { class: "grow" }),
  themeButton(redraw),
);
