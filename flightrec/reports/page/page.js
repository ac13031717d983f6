"use strict";
/* Draws the plots and searches. All text reaches the page through textContent, or Plotly with its markup escaped. */
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const config = { displayModeBar: false, responsive: true, showTips: false };
  const drawn = new Map();

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function isNarrow() {
    return document.documentElement.clientWidth < 640;
  }

  /* The middle of a long label goes: both ends tell more. An entity is one character. */
  function fitted(text) {
    const letters = text.match(/&(?:amp|lt|gt);|[\s\S]/g) || [];
    const width = isNarrow() ? 16 : 44;
    if (letters.length <= width) { return text; }
    const end = Math.floor((width - 1) * 2 / 3);
    return letters.slice(0, width - 1 - end).join("") + "\u2026" + letters.slice(letters.length - end).join("");
  }

  function themed(layout) {
    const grid = { gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), automargin: true };
    const result = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), size: 12 },
      margin: { l: 50, r: 12, t: 24, b: 44 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      hoverlabel: { namelength: -1 },
      dragmode: false,
      autosize: true,
    });
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (layout[name] || name !== "yaxis2") {
        result[name] = Object.assign({}, grid, layout[name], { fixedrange: true });
        if (result[name].ticktext) { result[name].ticktext = result[name].ticktext.map(fitted); }
      }
    }
    return result;
  }

  function logarithm(value) {
    return value !== null && value > 0 ? Math.log10(value) : null;
  }

  /* One measure of one tensor, the rows that the search leaves; "" for the largest over all tensors. */
  function heatMap(measure) {
    const maps = data.maps.maps[measure];
    const tensor = document.getElementById("tensor").value;
    const pattern = query();
    const parts = tensor === "" ? Object.values(maps) : (maps[tensor] ? [maps[tensor]] : []);
    const rows = [], names = [];
    data.maps.rows.forEach(function (name, place) {
      if (pattern !== "" && !data.maps.search[place].includes(pattern)) { return; }
      const row = data.maps.columns.map(function (_, column) {
        let largest = null;
        for (const part of parts) {
          const value = part[place][column];
          if (value !== null && (largest === null || value > largest)) { largest = value; }
        }
        return largest;
      });
      if (row.some(function (value) { return value !== null; })) { rows.push(row); names.push(name); }
    });
    const isLog = measure === "amax" || measure === "nonfinite" || measure === "error";
    const gap = data.maps.columns.length * 6 < document.documentElement.clientWidth - 200 ? 1 : 0;
    const hover = rows.map(function (row, y) {
      return row.map(function (value, x) {
        return names[y] + "<br>iteration " + data.maps.columns[x] + ": " + (value === null ? "-" : value);
      });
    });
    const trace = {
      type: "heatmap",
      z: isLog ? rows.map(function (row) { return row.map(logarithm); }) : rows,
      text: hover,
      hoverinfo: "text",
      colorscale: measure === "amax" ? "Viridis" : "Cividis",
      colorbar: { thickness: 12, title: { text: isLog ? "log10" : "" } },
      hoverongaps: true,
      xgap: gap,
      ygap: gap,
    };
    if (measure === "underflow" || measure === "saturated") { trace.zmin = 0; trace.zmax = 1; }
    const step = Math.max(1, Math.ceil(data.maps.columns.length / (isNarrow() ? 4 : 12)));
    const ticks = data.maps.columns.map(function (_, place) { return place; })
      .filter(function (place) { return (data.maps.columns.length - 1 - place) % step === 0; });
    const layout = {
      xaxis: {
        title: { text: "iteration" },
        tickvals: ticks,
        ticktext: ticks.map(function (place) { return data.maps.columns[place]; }),
        showgrid: false,
      },
      yaxis: {
        tickvals: names.map(function (_, place) { return place; }),
        ticktext: names,
        autorange: "reversed",
        tickfont: { size: 11 },
        showgrid: false,
      },
      height: Math.min(1600, 120 + 17 * Math.max(4, rows.length)),
    };
    return { data: [trace], layout: layout };
  }

  function figureOf(place) {
    const measure = place.dataset.map;
    return measure ? heatMap(measure) : data.plots[place.dataset.plot];
  }

  function draw(place) {
    const figure = figureOf(place);
    drawn.set(place, true);
    Plotly.react(place, figure.data, themed(figure.layout), config);
  }

  function isShown(place) {
    return place.getClientRects().length > 0;
  }

  /* One after the other, so that the page can be scrolled meanwhile; a plot inside closed details waits for them. */
  function drawMissing() {
    const next = Array.from(document.querySelectorAll(".plot"))
      .find(function (place) { return !drawn.has(place) && isShown(place); });
    if (!next) { document.documentElement.dataset.drawn = "all"; return; }
    delete document.documentElement.dataset.drawn;
    draw(next);
    setTimeout(drawMissing, 0);
  }

  function redraw(selector) {
    for (const place of document.querySelectorAll(selector)) {
      if (drawn.has(place)) { isShown(place) ? draw(place) : drawn.delete(place); }
    }
  }

  function query() {
    return document.getElementById("search").value.trim().toLowerCase();
  }

  function search() {
    const pattern = query();
    let found = 0, total = 0;
    for (const entry of document.querySelectorAll("[data-name]")) {
      const matches = pattern === "" || entry.dataset.name.toLowerCase().includes(pattern);
      entry.hidden = !matches;
      if (entry.tagName === "TR") { total += 1; found += matches ? 1 : 0; }
    }
    const told = pattern === "" ? "" : found + " of " + total + " tensors";
    document.getElementById("found").textContent = told;
    redraw("[data-map]");
    drawMissing();
  }

  let waiting = 0;
  document.getElementById("search").addEventListener("input", function () {
    clearTimeout(waiting);
    waiting = setTimeout(search, 120);
  });
  document.getElementById("tensor").addEventListener("change", function () { redraw("[data-map]"); });
  for (const entry of document.querySelectorAll("details")) { entry.addEventListener("toggle", drawMissing); }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { redraw(".plot"); });
  window.matchMedia("(max-width: 639px)").addEventListener("change", function () { redraw(".plot"); });
  drawMissing();
})();
