// Light or dark theme: that of the system unless the user has chosen one, and always light in print.
import { el, fill } from "./dom.js";

const KEY = "whet-theme";
const CHOICES = ["auto", "light", "dark"];

/** Creates a button that cycles through auto, light and dark. `redraw` draws the canvases again. */
export function themeButton(redraw) {
  let choice = remembered();
  const button = el("button", {
    type: "button",
    class: "quiet theme",
    onclick: () => choose(CHOICES[(CHOICES.indexOf(choice) + 1) % 3]),
  });
  const apply = (theme) => {
    if (theme === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", theme);
    redraw(theme);
  };
  const choose = (theme) => {
    choice = theme;
    fill(button, `theme: ${theme}`);
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // localStorage may be unavailable, for example for a local file.
    }
    apply(theme);
  };
  fill(button, `theme: ${choice}`);
  apply(choice);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(`${choice} ${Math.random()}`));
  addEventListener("beforeprint", () => apply("light"));
  addEventListener("afterprint", () => apply(choice));
  return button;
}

function remembered() {
  try {
    const theme = localStorage.getItem(KEY);
    return CHOICES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}
