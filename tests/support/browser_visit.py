"""A visit to a page in a real browser, with everything that went wrong during it."""

import os
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, StorageState

PHONE, DESK = (390, 844), (1280, 900)
TIMEOUT_MS = 120_000

_TOO_WIDE = """() => {
  const most = document.documentElement.clientWidth;
  const isScrolled = (node) => {
    for (let up = node.parentElement; up && up !== document.body; up = up.parentElement)
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  return [...document.body.querySelectorAll("*")]
    .filter((node) => node.checkVisibility() && node.getBoundingClientRect().right > most + 1 && !isScrolled(node))
    .map((node) => `${node.tagName}.${node.className} ${node.textContent.slice(0, 40)}`);
}"""

_UNREADABLE = """() => {
  const channel = (value) => ((value /= 255), value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true }), known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      known.set(colour, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const over = (top, under) => top.slice(0, 3).map((part, i) => (part * top[3] + under[i] * (255 - top[3])) / 255);
  const behind = (node) => {
    const layers = [];
    for (let up = node; up; up = up.parentElement) layers.push(parse(getComputedStyle(up).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = new Map();
  for (const node of document.body.querySelectorAll("*")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const under = behind(node), [a, b] = [light(over(parse(getComputedStyle(node).color), under)), light(under)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.set(`${node.tagName}.${node.className}`, contrast.toFixed(2));
  }
  return Object.fromEntries(found);
}"""

_TOGGLE = """(isOpen) => Promise.all([...document.querySelectorAll("details")].map((one) => {
  if (one.open === isOpen) return null;
  const done = new Promise((resolve) => one.addEventListener("toggle", resolve, { once: true }));
  one.open = isOpen;
  return done;
})).then(() => null)"""


class Visit:
    """One page. `faults` are console errors, failed scripts, dialogs, and requests to other servers."""

    def __init__(
        self,
        browser: Browser,
        pictures: Path,
        *,
        home: str,
        size: tuple[int, int] = DESK,
        scheme: str = "light",
        state: StorageState | None = None,
        is_offline: bool = False,
    ) -> None:
        width, height = size
        options: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
        if size == PHONE:
            options |= {"is_mobile": True, "has_touch": True}
        self._context = browser.new_context(**options, storage_state=state, offline=is_offline, reduced_motion="reduce")
        self._context.set_default_timeout(TIMEOUT_MS)
        self._pictures = pictures
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.page: Page = self._context.new_page()
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self._note(f"script: {error}"))
        self.page.on("dialog", lambda dialog: (self._note(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda asked: self.requests.append(asked.url))
        self.page.on("request", lambda asked: self._note(f"left home: {asked.url}", not asked.url.startswith(home)))

    def _listen(self, reported: ConsoleMessage) -> None:
        self._note(f"console: {reported.text} ({reported.location['url']})", reported.type in ("error", "warning"))

    def _note(self, fault: str, is_fault: bool = True) -> None:
        if is_fault:
            self.faults.append(fault)

    @property
    def state(self) -> StorageState:
        """Return the cookies, for another visit."""
        return self._context.storage_state()

    def picture(self, name: str, *, whole: bool = False, of: str | None = None) -> None:
        """Take a screenshot of the view, the whole page, or one element."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path = self._pictures / f"{name}.png"
        if of is None:
            self.page.screenshot(path=path, full_page=whole)
        else:
            self.page.locator(of).screenshot(path=path)

    def open_all(self, is_open: bool = True) -> None:
        """Open or close everything that can be expanded."""
        self.page.evaluate(_TOGGLE, is_open)

    @property
    def too_wide(self) -> list[str]:
        """Return the elements beyond the right edge, which would need horizontal scrolling."""
        wide = self.page.evaluate("() => document.scrollingElement.scrollWidth - document.documentElement.clientWidth")
        return [*([f"the page by {wide} pixels"] if wide > 0 else []), *self.page.evaluate(_TOO_WIDE)]

    @property
    def unreadable(self) -> dict[str, str]:
        """Return texts with a contrast below 4.5 to 1."""
        result: dict[str, str] = self.page.evaluate(_UNREADABLE)
        return result

    def close(self) -> None:
        self._context.close()


def pictures_folder(otherwise: Path) -> Path:
    """Return the folder for screenshots: $WHET_SCREENSHOTS, or a temporary folder."""
    folder = Path(os.environ.get("WHET_SCREENSHOTS") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
