// Charts as SVG, drawn from the figures of _util/page.py: charts.draw(id, figure). All colours are the page's.
var charts = (function () {
  "use strict";
  var NS = "http://www.w3.org/2000/svg", ruler = document.createElement("canvas").getContext("2d");

  function svg(parent, tag, attributes, text) {
    var made = document.createElementNS(NS, tag);
    Object.keys(attributes || {}).forEach(function (name) { made.setAttribute(name, attributes[name]); });
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }
  function div(parent, tag, name, text) {
    var made = document.createElement(tag);
    made.className = name;
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }
  function wide(text) {
    ruler.font = "13px system-ui, sans-serif";
    return ruler.measureText(text).width * 1.05;
  }
  function ticks(low, high, most) {
    var rough = (high - low) / Math.max(most, 1), power = Math.pow(10, Math.floor(Math.log10(rough)));
    var step = power * ([1, 2, 2.5, 5].find(function (n) { return n * power >= rough; }) || 10), found = [];
    for (var i = Math.ceil(low / step); i * step <= high * (1 + 1e-9); i++) found.push(i * step);
    return found;
  }
  function number(value) {
    return value.toLocaleString("en", { maximumSignificantDigits: value && Math.abs(value) < 1e3 ? 4 : 9 });
  }
  function fill(defs, id, series) { // hatched: a second kind of the same colour
    var colour = "var(--" + series.colour + ")";
    if (!series.hatched) return colour;
    var name = id + "-" + series.colour;
    var pattern = svg(defs, "pattern", { id: name, width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" });
    svg(pattern, "rect", { width: 6, height: 6 }).style.fill = colour;
    svg(pattern, "rect", { width: 2.5, height: 6 }).style.fill = "var(--paper)";
    return "url(#" + name + ")";
  }
  var shapes = { // paths around 0, 0
    dot: "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0z",
    cross: "M-4,-4L4,4M-4,4L4,-4",
    tick: "M0,-9V9",
    star: "M0,-9L2.3,-3.2 8.6,-2.8 3.8,1.2 5.3,7.3 0,4 -5.3,7.3 -3.8,1.2 -8.6,-2.8 -2.3,-3.2z",
  };
  function shape(parent, series, x, y) {
    var lines = series.shape === "cross" || series.shape === "tick";
    var made = svg(parent, "path", { d: shapes[series.shape], transform: "translate(" + x + "," + y + ")" });
    made.style.fill = lines ? "none" : "var(--" + series.colour + ")";
    made.style.stroke = "var(--" + (lines ? series.colour : series.shape === "star" ? "ink" : "paper") + ")";
    made.style.strokeWidth = lines ? 2.2 : series.shape === "star" ? 1.4 : 0.7;
    return made;
  }
  function legend(box, id, figure) { // above the chart, so that it covers nothing
    var list = div(box, "div", "legend");
    figure.series.forEach(function (series, i) {
      var entry = div(list, "span", ""), sign = svg(entry, "svg", { width: 18, height: 18, viewBox: "-9 -9 18 18" });
      if (series.shape === "line") svg(sign, "path", { d: "M-8,0H8", class: "front" });
      else if (series.shape) shape(sign, series, 0, 0);
      else {
        var paint = fill(svg(sign, "defs"), id + "-sign" + i, series);
        svg(sign, "rect", { x: -7, y: -6, width: 14, height: 12, rx: 2 }).style.fill = paint;
      }
      entry.appendChild(document.createTextNode(series.name));
    });
  }

  function draw(id, figure) {
    var box = document.getElementById(id), domain = [0, figure.x.max];

    function paint() {
      var width = box.clientWidth, narrow = width < 560, rows = figure.rows;
      box.textContent = "";
      legend(box, id, figure);
      var label = function (row) { return narrow ? row[0] : row.join("  "); };
      var levels = rows ? [] : ticks(0, figure.y.max, 6);
      var left = 10 + Math.max.apply(null, (rows ? rows.map(label) : levels.map(number)).map(wide)) + (rows ? 0 : 22);
      var inner = Math.max(width - left - 14, 50), scale = inner / (domain[1] - domain[0]);
      var at = function (x) { return left + (x - domain[0]) * scale; };

      // Marks of the x axis have their words above the chart, one line lower for each that has room.
      var ends = [], marks = figure.marks.filter(function (mark) {
        return mark.axis === "y" || (mark.at >= domain[0] && mark.at <= domain[1]);
      }).map(function (mark) {
        if (mark.axis === "y") return { mark: mark };
        var size = wide(mark.text), begin = Math.min(Math.max(at(mark.at) - 4, left), left + inner - size), line = 0;
        while (ends[line] > begin) line++;
        ends[line] = begin + size + 12;
        return { mark: mark, begin: begin, line: line };
      });
      var top = 8 + 18 * ends.length, height = rows ? figure.rowHeight * rows.length : figure.height - (narrow ? 120 : 0);
      var bottom = top + height, up = function (y) { return bottom - y / figure.y.max * height; };
      var root = svg(box, "svg", { width: width, height: bottom + 44, class: "drawn", role: "img" });
      root.setAttribute("aria-label", figure.x.title + (figure.y.title ? " and " + figure.y.title : ""));
      var defs = svg(root, "defs"), clip = svg(defs, "clipPath", { id: id + "-clip" });
      svg(clip, "rect", { x: left, y: top - 9, width: inner, height: height + 10 });

      ticks(domain[0], domain[1], inner / 90).forEach(function (x) {
        svg(root, "path", { d: "M" + at(x) + "," + top + "V" + bottom, class: "grid" });
        svg(root, "text", { x: at(x), y: bottom + 17, "text-anchor": "middle" }, number(x));
      });
      svg(root, "text", { x: left + inner / 2, y: bottom + 37, "text-anchor": "middle", class: "title" }, figure.x.title);
      levels.forEach(function (y) {
        svg(root, "path", { d: "M" + left + "," + up(y) + "h" + inner, class: "grid" });
        svg(root, "text", { x: left - 8, y: up(y) + 4, "text-anchor": "end" }, number(y));
      });
      if (rows) rows.forEach(function (row, i) {
        var y = top + (i + 0.5) * figure.rowHeight;
        svg(root, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, label(row));
      });
      else svg(root, "text", { transform: "translate(13," + (top + height / 2) + ") rotate(-90)",
        "text-anchor": "middle", class: "title" }, figure.y.title);

      var data = svg(root, "g", { "clip-path": "url(#" + id + "-clip)" });
      (figure.kind === "area" ? areas : items)(data, defs);
      marks.forEach(function (each) {
        var mark = each.mark, across = mark.axis === "y", y = across ? up(mark.at) : 0;
        var path = across ? "M" + left + "," + y + "h" + inner : "M" + at(mark.at) + "," + (14 + 18 * each.line) + "V" + bottom;
        svg(root, "path", { d: path, class: "mark" + (mark.dashed ? " dashed" : "") });
        var place = across ? { x: left + 6, y: y - 5 } : { x: each.begin, y: 11 + 18 * each.line };
        svg(root, "text", Object.assign(place, { class: "said" }), mark.text);
      });
      follow(root, data);

      function items(group, defs) {
        figure.series.forEach(function (series, n) {
          var colour = fill(defs, id + "-bar" + n, series);
          if (series.shape === "line") {
            var path = series.x.map(function (x, i) { return (i ? "H" + at(x) + "V" : "M" + at(x) + ",") + up(series.y[i]); });
            svg(group, "path", { d: path.join(""), class: "front" });
            return;
          }
          (series.notes || []).forEach(function (note, i) {
            var made, y;
            if (series.shape) {
              y = rows ? top + (series.row[i] + 0.5) * figure.rowHeight : up(series.y[i]);
              made = shape(group, series, at(series.x[i]), y);
            } else {
              var long = Math.max((series.to[i] - series.from[i]) * scale, 1); // a pixel at least
              if (at(series.to[i]) < left || at(series.from[i]) > left + inner) return;
              y = top + (series.row[i] + 0.14) * figure.rowHeight;
              made = svg(group, "rect", { x: at(series.from[i]), y: y, width: long, height: 0.72 * figure.rowHeight });
              made.style.fill = colour;
              if (long > 4) made.setAttribute("class", "bar");
            }
            made.note = note;
          });
        });
      }

      function areas(group, defs) {
        var sums = figure.at.map(function () { return 0; });
        figure.series.forEach(function (series, n) {
          var below = sums.slice(), path = "", back = "";
          figure.at.forEach(function (x, i) {
            sums[i] += series.y[i];
            path += (i ? "H" + at(x).toFixed(1) + "V" : "M" + at(x).toFixed(1) + ",") + up(sums[i]).toFixed(1);
          });
          for (var i = figure.at.length - 1; i >= 0; i--) {
            back += "L" + at(figure.at[i]).toFixed(1) + "," + up(below[i]).toFixed(1);
            if (i) back += "V" + up(below[i - 1]).toFixed(1);
          }
          svg(group, "path", { d: path + back + "z" }).style.fill = fill(defs, id + "-area" + n, series);
        });
      }

      // The pointer: what it is on, and a range that it draws.
      function follow(root, data) {
        var tip = div(box, "div", "tip"), from = null;
        var range = svg(root, "rect", { y: top, height: height, width: 0, class: "range" });
        var ruler = svg(root, "path", { class: "ruler" });
        var place = function (event) { return event.clientX - root.getBoundingClientRect().left; };
        function say(event) {
          var x = place(event), note = event.target.note;
          if (figure.kind === "area" && x >= left && x <= left + inner) {
            var when = domain[0] + (x - left) / scale, i = figure.at.findIndex(function (t) { return t > when; });
            i = (i < 0 ? figure.at.length : i || 1) - 1;
            var lines = figure.series.filter(function (series) { return series.y[i]; }).map(function (series) {
              return series.name + "  " + number(series.y[i]) + " " + figure.y.title;
            });
            note = [number(figure.at[i]) + " ms"].concat(lines.reverse()).join("\n");
            ruler.setAttribute("d", "M" + x + "," + top + "V" + bottom);
          }
          tip.textContent = note || "";
          tip.style.display = note ? "block" : "none";
          var there = box.getBoundingClientRect(), right = x + 14 + tip.offsetWidth > width;
          tip.style.left = Math.max(right ? x - 14 - tip.offsetWidth : x + 14, 0) + "px";
          tip.style.top = event.clientY - there.top + 14 + "px";
        }
        root.addEventListener("pointermove", function (event) {
          say(event);
          if (from === null) return;
          range.setAttribute("x", Math.max(Math.min(from, place(event)), left));
          range.setAttribute("width", Math.abs(place(event) - from));
        });
        root.addEventListener("pointerleave", function () {
          tip.style.display = "none";
          ruler.removeAttribute("d");
        });
        if (!figure.zooms) return;
        root.addEventListener("pointerdown", function (event) {
          if (event.pointerType === "mouse") from = place(event);
        });
        root.addEventListener("pointerup", function (event) {
          if (from === null) return;
          var ends = [from, place(event)].map(function (x) { return domain[0] + (x - left) / scale; });
          ends.sort(function (a, b) { return a - b; });
          if (Math.abs(place(event) - from) > 6) domain = [Math.max(ends[0], 0), Math.min(ends[1], figure.x.max)];
          from = null;
          paint();
        });
        root.addEventListener("dblclick", function () {
          domain = [0, figure.x.max];
          paint();
        });
      }
    }

    var last = 0;
    if (box.watcher) box.watcher.disconnect();
    box.watcher = new ResizeObserver(function () {
      if (box.clientWidth !== last) {
        last = box.clientWidth;
        paint();
      }
    });
    paint();
    last = box.clientWidth;
    box.watcher.observe(box);
  }
  return { draw: draw };
})();
