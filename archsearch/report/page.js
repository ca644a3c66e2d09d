// Shows a candidate's label, metrics and head map beside the pointer, and lights its card.
(() => {
  const data = JSON.parse(document.getElementById("candidates").textContent);
  const tip = document.getElementById("tip");
  const el = (name, attributes, parent) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  };

  function picture(layers) {
    const cell = layers.length > 40 ? 7 : 9, gap = 3, group = data.groupSize;
    const top = head => head * cell + Math.floor(head / group) * gap + 1;
    const heads = layers[0].length;
    const svg = el("svg", { width: layers.length * (cell + 2) + 2, height: top(heads - 1) + cell + 2 });
    layers.forEach((row, layer) => {
      const x = layer * (cell + 2) + 1;
      [...row].forEach((letter, head) => el("rect", {
        x, y: top(head), width: cell, height: cell - 1, fill: data.colours[letter] }, svg));
      for (let first = 0; first < heads; first += group) {
        if (!row.slice(first, first + group).includes("F")) continue;
        el("rect", { x: x - 0.5, y: top(first) - 0.7, width: cell + 1, height: group * cell + 0.4,
          fill: "none", stroke: data.outline, "stroke-width": 1.2 }, svg);
      }
    });
    return svg;
  }

  function show(point, x, y) {
    const found = data.points[point.dataset.key];
    const title = document.createElement("b");
    title.textContent = found.label;
    const list = document.createElement("dl");
    for (const [name, value] of found.metrics) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }));
      list.append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    tip.replaceChildren(title, list, picture(found.layers));
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 16, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, y + 16 + box.height > innerHeight ? y - box.height - 12 : y + 16) + "px";
    light(point.dataset.key, true);
  }

  function light(key, on) {
    document.getElementById("card-" + key)?.classList.toggle("lit", on);
  }

  function hide(point) {
    tip.style.display = "none";
    light(point.dataset.key, false);
  }

  for (const point of document.querySelectorAll(".point")) {
    point.addEventListener("pointermove", event => show(point, event.clientX, event.clientY));
    point.addEventListener("pointerleave", () => hide(point));
    point.addEventListener("focus", () => {
      const box = point.getBoundingClientRect();
      show(point, box.right, box.bottom);
    });
    point.addEventListener("blur", () => hide(point));
    point.addEventListener("click", () =>
      document.getElementById("card-" + point.dataset.key)?.scrollIntoView({ behavior: "smooth", block: "center" }));
  }
  for (const card of document.querySelectorAll(".card")) {
    const key = card.id.slice("card-".length);
    const points = document.querySelectorAll(`.point[data-key="${key}"]`);
    card.addEventListener("pointerenter", () => points.forEach(p => p.classList.add("lit")));
    card.addEventListener("pointerleave", () => points.forEach(p => p.classList.remove("lit")));
  }
})();
