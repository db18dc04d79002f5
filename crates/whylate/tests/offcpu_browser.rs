// SPDX-License-Identifier: MIT OR Apache-2.0
//! Flame graph in a browser: it opens at its root, search finds frames, and a clicked frame fills the width.

mod running;

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use running::whylate;

/// Three tenths of the time is in `poll`, all below `serve`; one tenth is in a tower higher than any screen.
fn folded() -> String {
    let tower = ";deeper".repeat(300);
    format!("server;serve;read;disk 6000000\nserver;serve;wait;poll 3000000\nserver;idle{tower} 1000000\n")
}

/// Searches and zooms, and stores the results where the test finds them.
const ASK: &str = r##"<script type="text/ecmascript"><![CDATA[
window.addEventListener("load", function() {
    var box = function(name) {
        var groups = Array.from(document.querySelectorAll("#frames g"));
        return groups.find(function(g) { return g.querySelector("title").textContent.startsWith(name + " "); });
    };
    var width = function(name) { return parseFloat(box(name).querySelector("rect").getAttribute("width")); };
    var told = [];
    var root = box("all").getBoundingClientRect();
    told.push("in_sight=" + (root.top >= 0 && root.bottom <= window.innerHeight));
    search("poll");
    told.push("found=" + document.getElementById("matched").firstChild.nodeValue);
    told.push("before=" + width("wait"));
    box("wait").dispatchEvent(new MouseEvent("click", { bubbles: true }));
    told.push("after=" + width("wait"));
    told.push("others=" + box("idle").classList.contains("hide"));
    unzoom();
    told.push("again=" + width("wait"));
    document.documentElement.setAttribute("data-told", told.join(";"));
});
]]></script></svg>"##;

/// Names of Chromium's executable.
const BROWSERS: [&str; 3] = ["chromium-headless-shell", "chromium", "chromium-browser"];

fn browser() -> Option<&'static str> {
    BROWSERS.into_iter().find(|name| {
        Command::new(name)
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    })
}

#[test]
fn flame_graph_searches_and_zooms_in_browser() -> Result<()> {
    let Some(browser) = browser() else {
        // CI installs a browser: a missing one is a failure there.
        ensure!(std::env::var_os("CI").is_none(), "no chromium (scripts/install-deps browser)");
        println!("skipped: no chromium (scripts/install-deps browser)");
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let (folded, graph) = (directory.path().join("x.folded"), directory.path().join("x.svg"));
    fs::write(&folded, self::folded())?;
    let paths = [&folded, &graph].map(|path| path.to_string_lossy().into_owned());
    let drawn = whylate(&["offcpu", "import", &paths[0], "-o", &paths[1]]).status()?;
    ensure!(drawn.success(), "the graph was not drawn");
    let svg = fs::read_to_string(&graph)?;
    fs::write(&graph, svg.trim_end().strip_suffix("</svg>").context("the graph does not end")?.to_owned() + ASK)?;
    let shown = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("file://{}", graph.display()))
        .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
        .stdin(Stdio::null())
        .output()?;
    let page = String::from_utf8_lossy(&shown.stdout);
    let result = page.split_once("data-told=\"").and_then(|(_, rest)| rest.split_once('"')).map(|(result, _)| result);
    let result =
        result.with_context(|| format!("the page told nothing: {}", String::from_utf8_lossy(&shown.stderr)))?;
    println!("{result}");
    let value = |name: &str| result.split(';').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    ensure!(value("in_sight") == Some("true"), "the root is out of sight: {result}");
    ensure!(value("found") == Some("Matched: 30.0%"), "{result}");
    let width = |name| -> Result<f64> { Ok(value(name).context("no width")?.trim_end_matches('%').parse()?) };
    let (before, after, again) = (width("before")?, width("after")?, width("again")?);
    // Widths are fractions or pixels; three tenths become the whole width.
    ensure!((after / before - 10.0 / 3.0).abs() < 0.05, "{result}");
    ensure!((again - before).abs() < 0.01 && value("others") == Some("true"), "{result}");
    Ok(())
}
