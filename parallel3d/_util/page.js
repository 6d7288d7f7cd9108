// Charts in the page's colours, light and dark, wide and narrow: charts.draw, charts.follow.
var charts = (function () {
  "use strict";
  var config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  function themed(layout) {
    var css = getComputedStyle(document.documentElement);
    function colour(name) { return css.getPropertyValue("--" + name).trim(); }
    var made = JSON.parse(JSON.stringify(layout)), narrow = window.innerWidth < 600;
    made.paper_bgcolor = made.plot_bgcolor = "rgba(0,0,0,0)";
    made.font = { color: colour("ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 };
    made.modebar = { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink") };
    made.hoverlabel = Object.assign(made.hoverlabel || {},
      { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } });
    ["xaxis", "yaxis"].forEach(function (axis) {
      made[axis].gridcolor = made[axis].zerolinecolor = colour("line");
      if (narrow) made[axis].fixedrange = true; // so that a finger scrolls the page
    });
    if (narrow) slim(made);
    made.shapes.forEach(function (shape) { shape.line.color = colour("mark"); });
    made.annotations.forEach(function (note) { note.font = { color: colour("mark") }; });
    return made;
  }
  function slim(layout) { // a legend of one column, which takes height, and short labels
    layout.legend.font = { size: 10 };
    layout.height += 13 * layout.meta.entries;
    if (layout.meta.labels) {
      layout.yaxis.tickvals = layout.meta.labels;
      layout.yaxis.ticktext = layout.meta.labels.map(function (label) { return label.split(" <i>")[0]; });
    }
  }
  function draw(id, figure) {
    var settings = Object.assign({}, config, { displayModeBar: window.innerWidth < 600 ? false : "hover" });
    Plotly.react(id, figure.data, themed(figure.layout), settings);
  }
  function follow(all) { // draws now, and again when colours or width change
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
    window.matchMedia("(max-width: 599px)").addEventListener("change", all);
    all();
  }
  return { draw: draw, follow: follow };
})();
