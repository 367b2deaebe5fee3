// JSON has no NaN: such numbers are null, and a map at the top names them. This restores them.

const NUMBERS = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** The same object with its NaN and infinities. */
export function restoreNonFinite(object) {
  const { nonfinite: marks, ...rest } = object;
  for (const [path, word] of Object.entries(marks ?? {})) {
    const names = path.split("/").map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
    const last = names.pop();
    const place = names.reduce(
      (inner, name) => (inner !== null && typeof inner === "object" && Object.hasOwn(inner, name) ? inner[name] : null),
      rest,
    );
    if (place !== null && Object.hasOwn(place, last) && place[last] === null && Object.hasOwn(NUMBERS, word))
      place[last] = NUMBERS[word];
  }
  return rest;
}
