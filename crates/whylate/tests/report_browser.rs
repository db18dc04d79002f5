// SPDX-License-Identifier: MIT OR Apache-2.0
//! A report in a browser: it loads nothing, raises no errors, and shows the figures of `replay` for the selected span.

#[path = "report/cdp.rs"]
mod cdp;
#[path = "report/fixtures.rs"]
mod fixtures;
mod running;
#[path = "report/tables.rs"]
mod tables;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use whylate_model::Snapshot;
use whylate_model::sources::named;

use cdp::{Browser, browser};
use fixtures::recording;
use running::whylate;
use tables::{Row, ensure_same};

/// Returns the colors of work, a disk, another thread on the CPU, and interrupts off.
const FILLS: &str = "['running', 'disk', 'thread', 'irqs_off'].map((kind) => { \
     const part = document.createElementNS('http://www.w3.org/2000/svg', 'path'); \
     part.setAttribute('class', 'k-' + kind); document.querySelector('svg.heat').append(part); \
     const { fill } = getComputedStyle(part); part.remove(); return fill; })";

fn name(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Writes a page of that many seconds and opens it. Returns the recording's name.
fn opened(browser: &mut Browser, directory: &Path, seconds: u64, is_evil: bool) -> Result<String> {
    let file = recording(directory, seconds, is_evil)?;
    let out = directory.join("x.html");
    let output = whylate(&["report", name(&file), "-o", name(&out)]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let width = json!({"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": false});
    browser.call("Emulation.setDeviceMetricsOverride", width)?;
    browser.open(&format!("file://{}", out.display()))?;
    Ok(name(&file).to_owned())
}

/// Returns the rows of a table: each cell's value, or its text if it has none.
fn shown(browser: &mut Browser, table: &str) -> Result<Vec<Row>> {
    let rows = browser.value(&format!(
        "[...document.querySelectorAll('{table} > tbody > tr:not(.more)')].map((row) => [...row.cells].map((cell) => cell.dataset.v === undefined ? cell.textContent : cell.dataset.v))"
    ))?;
    Ok(serde_json::from_value(rows)?)
}

/// Runs the `replay` command that the page shows for the selection.
fn replayed(browser: &mut Browser, file: &str) -> Result<Value> {
    let command = browser.text("document.getElementById('command').textContent")?;
    let span = command.strip_prefix(&format!("whylate replay {file}")).with_context(|| command.clone())?;
    let words: Vec<&str> = span.split_whitespace().collect();
    let output = whylate(&["replay", file]).args(&words).arg("--json").output()?;
    ensure!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The tables show the overview of the selection.
fn ensure_as_replayed(browser: &mut Browser, file: &str) -> Result<Value> {
    let look = replayed(browser, file)?;
    let (sources, culprits) = (shown(browser, "#sources")?, shown(browser, "#culprits")?);
    ensure_same(&sources, &culprits, &look)?;
    Ok(look)
}

/// The page requested nothing else, violated no policy, and raised no error.
fn ensure_quiet(browser: &mut Browser) -> Result<()> {
    // Pending events arrive before this answer.
    browser.value("new Promise((done) => setTimeout(() => done(true), 50))")?;
    for event in std::mem::take(&mut browser.events) {
        match event["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => {
                let address = event["params"]["request"]["url"].as_str().unwrap_or_default();
                // Saving creates a blob URL.
                ensure!(address.ends_with("/x.html") || address.starts_with("blob:"), "it asks for {address}");
            }
            "Log.entryAdded" | "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" => {
                anyhow::bail!("{}", event["params"])
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the center of an element.
fn middle(browser: &mut Browser, selector: &str) -> Result<(f64, f64, f64, f64)> {
    let script = format!(
        "(() => {{ const of = document.querySelector('{selector}'); of.scrollIntoView({{block: 'center'}}); const box = of.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; }})()"
    );
    Ok(serde_json::from_value(browser.value(&script)?)?)
}

#[test]
fn selected_span_has_figures_of_replay() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let file = opened(&mut browser, directory.path(), 40, false)?;
    ensure_as_replayed(&mut browser, &file).context("the whole span")?;

    // Drags over a source's graph.
    let (left, top, width, height) = middle(&mut browser, "#first svg.heat")?;
    let at = |share: f64| (left + width * share, top + height / 2.0);
    for (from, to) in [(0.21, 0.52), (0.9, 0.7), (0.0, 0.1), (0.33, 0.34)] {
        browser.drag(at(from), at(to))?;
        let look = ensure_as_replayed(&mut browser, &file).with_context(|| format!("{from} to {to}"))?;
        let slots = browser.text("document.getElementById('span').textContent")?;
        browser.value("(document.getElementById('show-all') || document.body).click()")?;
        let late = shown(&mut browser, "#late")?;
        let counted: u64 = look["sources"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|of| of["late"].as_u64().unwrap_or(0) + of["held_up"]["late"].as_u64().unwrap_or(0))
            .sum();
        ensure!(late.len() as u64 == counted, "{slots}: {} late events, {counted} replayed", late.len());
    }

    // The same selection with keys.
    browser.value("document.getElementById('from').focus()")?;
    for _ in 0..3 {
        browser.press("ArrowRight", 39)?;
    }
    browser.until("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")?;
    ensure!(browser.value("document.getElementById('from').value")? != "0", "no key moves the span");
    ensure_as_replayed(&mut browser, &file).context("by keys")?;

    // Series merge by their source's rules.
    ensure_series(&mut browser, &file)?;
    browser.value("document.getElementById('all').click()")?;
    ensure_as_replayed(&mut browser, &file).context("all of it again")?;
    ensure_quiet(&mut browser)
}

/// For each source whose command prints series, the page shows the same series.
fn ensure_series(browser: &mut Browser, file: &str) -> Result<()> {
    let command = browser.text("document.getElementById('command').textContent")?;
    let words: Vec<&str> = command.split_whitespace().skip(3).collect();
    for (source, options) in
        [("wq", &["--json", "3600"][..]), ("sqpoll", &["--json", "3600"]), ("irqsoff", &["--json", "3600"])]
    {
        let snapshot = replayed_source(file, &words, source, options)?;
        let table = format!("section[data-source={source}] table.series");
        let headings: Vec<String> = serde_json::from_value(
            browser.value(&format!("[...document.querySelectorAll('{table} th')].map((of) => of.textContent)"))?,
        )?;
        let rows = shown(browser, &table)?;
        ensure!(rows.len() == snapshot.series.len(), "{source}: {rows:?}\n{snapshot:?}");
        for series in &snapshot.series {
            let is_of = |row: &&Row| series.labels.values().zip(row.iter()).all(|(label, cell)| label == cell);
            let row = rows.iter().find(is_of).with_context(|| format!("{:?} is not there", series.labels))?;
            for (heading, cell) in headings.iter().zip(row) {
                let value = series.values.get(&heading.replace(' ', "_"));
                // Derived figures are not shown for a part of the span.
                if let Some(value) = value.filter(|_| cell != "-") {
                    ensure!(
                        (cell.parse::<f64>()? - value).abs() < 1e-9,
                        "{source} {heading}: {cell}, {value} replayed"
                    );
                }
            }
            for of in series.histograms.values() {
                let figures =
                    [of.count(), of.quantile_ns(0.5), of.quantile_ns(0.99), of.max_ns()].map(|of| of.to_string());
                ensure!(row.windows(4).any(|cells| cells == figures), "{source}: {row:?} has not {figures:?}");
            }
        }
        // The bars above show the same shares.
        let text = browser.text(&format!(
            "[...document.querySelectorAll('section[data-source={source}] ul.shares li')].map((of) => of.textContent).join()"
        ))?;
        let shares = named(source).map_or(&[][..], |card| card.shares);
        for (name, value) in snapshot.series.iter().flat_map(|series| &series.values) {
            let share = format!("{name} {:.1}%", value * 100.0);
            ensure!(!shares.contains(&name.as_str()) || text.contains(&share), "{source}: no {share} in {text}");
        }
    }
    let snapshot = replayed_source(file, &words, "block", &["--json", "3600"])?;
    let rows = shown(browser, "section[data-source=block] table.grouped")?;
    let groups = snapshot.merged_by("device");
    ensure!(rows.len() == groups.len() && !groups.is_empty(), "{rows:?}\n{groups:?}");
    for of in groups {
        let (device, latency) = (&of.labels["device"], &of.histograms["latency"]);
        let figures = [latency.count(), latency.quantile_ns(0.5), latency.quantile_ns(0.99), latency.max_ns()];
        let figures = figures.map(|of| of.to_string());
        let is_it = |row: &Row| row[0] == *device && row.windows(4).any(|cells| cells == figures);
        ensure!(rows.iter().any(is_it), "no {device} with {figures:?} in {rows:?}");
    }
    Ok(())
}

fn replayed_timerlat(file: &str, span: &[&str]) -> Result<Snapshot> {
    let output = whylate(&["replay", file]).args(span).args(["timerlat", "top", "-q", "--json"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    Ok(serde_json::from_str(last)?)
}

fn replayed_source(file: &str, span: &[&str], source: &str, options: &[&str]) -> Result<Snapshot> {
    let output = whylate(&["replay", file]).args(span).arg(source).args(options).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(text.lines().count() == 1, "{text}");
    Ok(serde_json::from_str(&text)?)
}

#[test]
fn culprits_filter_events_and_headings_sort_tables() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    opened(&mut browser, directory.path(), 30, false)?;
    ensure!(shown(&mut browser, "#late")?.len() == 50, "the first ones");
    browser.value("document.getElementById('show-all').click()")?;
    let all = shown(&mut browser, "#late")?.len();

    // A culprit's button filters the events that it took part in.
    browser.value("document.querySelector('#culprits tbody button').click()")?;
    let few = shown(&mut browser, "#late")?;
    ensure!(!few.is_empty() && few.len() < all, "{} of {all}", few.len());
    ensure!(
        browser.value("document.querySelector('#culprits button[aria-pressed=true]') === document.activeElement")?
            == true
    );
    browser.value("document.getElementById('unfilter').click()")?;
    ensure!(shown(&mut browser, "#late")?.len() == all);

    // Headings sort the table and show the order.
    browser.value("[...document.querySelectorAll('#late th button')][2].click()")?;
    let latencies = |rows: &[Row]| rows.iter().map(|row| row[2].parse()).collect::<Result<Vec<u64>, _>>();
    ensure!(latencies(&shown(&mut browser, "#late")?)?.is_sorted_by(|a, b| a >= b));
    browser.value("[...document.querySelectorAll('#late th button')][2].click()")?;
    ensure!(latencies(&shown(&mut browser, "#late")?)?.is_sorted());
    ensure!(browser.text("document.querySelectorAll('#late th')[2].getAttribute('aria-sort')")? == "ascending");

    // A key opens an event with its path, causes and stacks.
    let event = "[...document.querySelectorAll('#late button.open')].find((of) => of.closest('tr').cells[1].textContent === 'offcpu' && parseFloat(of.closest('tr').cells[2].dataset.v) > 100e6)";
    browser.value(&format!("{event}.focus()"))?;
    browser.press("Enter", 13)?;
    browser.until("document.querySelector('tr.more svg.path') !== null")?;
    let text = browser.text("document.querySelector('tr.more').textContent")?;
    for part in [
        "In order of time",
        "writer:99 worked (while postgres:4711 waited in futex)",
        "Victim: postgres:4711",
        "futex_wait",
        "Waker: writer:99",
        "io_schedule",
    ] {
        ensure!(text.contains(part), "{part}: {text}");
    }
    let widths = browser.value("[...document.querySelectorAll('tr.more svg.path path')].map((of) => Number(of.getAttribute('d').match(/h(\\d+)/)[1])).reduce((a, b) => a + b)")?;
    ensure!((9_990..=10_000).contains(&widths.as_u64().context("no widths")?), "parts add up to {widths}");
    ensure_quiet(&mut browser)
}

#[test]
fn flame_graphs_are_searched_and_zoomed() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    opened(&mut browser, directory.path(), 30, false)?;
    let graph = "document.querySelector('section[data-source=offcpu] .graph')";
    let root = browser.text(&format!("{graph}.querySelector('svg.flame g').getAttribute('aria-label')"))?;
    ensure!(root.starts_with("all: ") && root.ends_with("(100.0%)"), "{root}");
    let is_in_sight = format!(
        "{graph}.querySelector('svg.flame').scrollIntoView(), {graph}.querySelector('svg.flame g').getBoundingClientRect().top > -1"
    );
    ensure!(browser.value(&is_in_sight)? == true, "the root is out of sight");
    // Per second, a lock takes 600 ms and a disk 200 ms on average.
    browser.value(&format!("{graph}.querySelector('input[type=search]').focus()"))?;
    browser.call("Input.insertText", json!({"text": "io_schedule"}))?;
    let matched = browser.text(&format!("{graph}.querySelector('output').textContent"))?;
    ensure!(matched == "Matched: 25.0%", "{matched}");
    ensure!(browser.value(&format!("{graph}.querySelectorAll('g.hit').length"))?.as_u64() > Some(0));
    let width = |name: &str| {
        format!(
            "Number([...{graph}.querySelectorAll('svg.flame g')].find((of) => of.getAttribute('aria-label').startsWith('{name}:')).querySelector('rect').getAttribute('width'))"
        )
    };
    let before = browser.value(&width("ext4_sync"))?.as_f64().context("no width")?;
    browser.value(&format!("[...{graph}.querySelectorAll('svg.flame g')].find((of) => of.getAttribute('aria-label').startsWith('ext4_sync:')).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"))?;
    let after = browser.value(&width("ext4_sync"))?.as_f64().context("no width")?;
    ensure!((after / before - 4.0).abs() < 0.05, "{before} became {after}");
    // Keys navigate the graph.
    browser.press("Escape", 27)?;
    ensure!((browser.value(&width("ext4_sync"))?.as_f64().context("no width")? - before).abs() < 0.2);
    browser.value(&format!("{graph}.querySelector('svg.flame g').focus()"))?;
    browser.press("ArrowDown", 40)?;
    let first = browser.text("document.activeElement.getAttribute('aria-label')")?;
    ensure!(first.starts_with("postgres: "), "{first}");
    // Threads that are idle by design are hidden by default.
    ensure!(!browser.text(&format!("{graph}.querySelector('svg.flame').textContent"))?.contains("cron"));
    browser.value(&format!("{graph}.querySelector('input[type=checkbox]').click()"))?;
    ensure!(browser.text(&format!("{graph}.querySelector('svg.flame').textContent"))?.contains("cron"));
    ensure_quiet(&mut browser)
}

/// Returns the lowest contrast of any text with its background, and where it is.
const CONTRAST: &str = r"(() => {
    const parsed = (color) => { const of = color.match(/[\d.]+/g).map(Number); return of.length > 3 ? of : [...of, 1]; };
    const light = ([r, g, b]) => { const of = [r, g, b].map((c) => (c /= 255, c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)); return 0.2126 * of[0] + 0.7152 * of[1] + 0.0722 * of[2]; };
    const paper = (of) => { for (; of; of = of.parentElement) { const color = parsed(getComputedStyle(of).backgroundColor); if (color[3] > 0) return color; } return [255, 255, 255, 1]; };
    let least = [99, ''];
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
        const of = node.parentElement;
        if (!node.textContent.trim() || of.closest('script, style, noscript, title') || of.getClientRects().length === 0) continue;
        const svg = of.closest('svg.flame g');
        const ink = parsed(svg ? getComputedStyle(of).fill : getComputedStyle(of).color);
        const below = svg ? parsed(getComputedStyle(svg.querySelector('rect')).fill) : paper(of);
        const [one, other] = [light(ink), light(below)].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (other + 0.05);
        if (ratio < least[0]) least = [ratio, of.tagName + ' ' + of.className + ': ' + node.textContent.slice(0, 40) + ' ' + ink + ' on ' + below];
    }
    return least;
})()";

#[test]
fn is_accessible_in_light_and_dark_wide_and_narrow() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    opened(&mut browser, directory.path(), 20, false)?;
    browser.value("document.querySelectorAll('details').forEach((of) => { of.open = true; }); document.querySelector('#late button.open').click(); document.querySelector('#culprits tbody button').click()")?;
    for scheme in ["light", "dark"] {
        browser.call(
            "Emulation.setEmulatedMedia",
            json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        )?;
        let least = browser.value(CONTRAST)?;
        println!("{scheme}: {least}");
        ensure!(least[0].as_f64() >= Some(4.5), "{scheme}: {least}");
        // Work, waits, and culprits on the CPU have different colors.
        let fills = browser.value(FILLS)?;
        let fills: BTreeSet<&str> = fills.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        ensure!(fills.len() == 4, "{scheme}: {fills:?}");
    }
    let dark = browser.text("getComputedStyle(document.body).backgroundColor")?;
    ensure!(dark == "rgb(20, 23, 27)", "it is not dark: {dark}");
    ensure_narrow(&mut browser)?;
    // Every control is a button, a field, or in the tab order.
    let others = browser.value(
        "[...document.querySelectorAll('button, input, summary')].filter((of) => of.tabIndex < 0).length + [...document.querySelectorAll('svg.flame')].filter((of) => of.querySelectorAll('g[tabindex=\"0\"]').length !== 1).length",
    )?;
    ensure!(others == 0, "{others} cannot be reached");
    ensure_quiet(&mut browser)?;
    // Times of a short recording have milliseconds.
    opened(&mut browser, directory.path(), 5, false)?;
    ensure_narrow(&mut browser)
}

/// Nothing is wider than a phone's screen unless it scrolls on its own.
fn ensure_narrow(browser: &mut Browser) -> Result<()> {
    let narrow = json!({"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": false});
    browser.call("Emulation.setDeviceMetricsOverride", narrow)?;
    browser.until("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")?;
    let width = browser.value("document.documentElement.scrollWidth")?;
    ensure!(width == 390, "it is {width} wide");
    // Columns beyond the screen leave no blanks, and culprits need none.
    let tall = browser.value(
        "[...document.querySelectorAll('#sources tr, #late tr:not(.more), #culprits tr')].filter((of) => of.getBoundingClientRect().height > 120).map((of) => of.textContent)",
    )?;
    ensure!(tall == json!([]), "{tall}");
    let culprits = browser.value("(() => { const of = document.getElementById('culprits').parentNode; return of.scrollWidth - of.clientWidth; })()")?;
    ensure!(culprits == 0, "culprits are {culprits} wider than the screen");
    Ok(())
}

#[test]
fn hostile_names_run_no_script() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    opened(&mut browser, directory.path(), 14, true)?;
    // Opens, selects and draws everything.
    browser.value(
        "document.querySelectorAll('details').forEach((of) => { of.open = true; }); \
         for (let at = 0; at < 20; at++) { const of = document.querySelectorAll('#late button.open')[at]; if (of) of.click(); } \
         const count = document.querySelectorAll('#culprits tbody button').length; \
         for (let at = 0; at < count; at++) document.querySelectorAll('#culprits tbody button')[at].click(); \
         document.querySelectorAll('th button').forEach((of) => of.click())",
    )?;
    let (left, top, width, height) = middle(&mut browser, "#first svg.heat")?;
    browser.drag((left + width * 0.2, top + height / 2.0), (left + width * 0.8, top + height / 2.0))?;
    ensure!(browser.text("document.title")? != "owned", "a name is executed");
    let strangers = browser.value("document.querySelectorAll('img, iframe, a, object, embed, form, link').length + document.querySelectorAll('script').length - 3")?;
    ensure!(strangers == 0, "{strangers} elements are a stranger's");
    ensure!(browser.text("document.body.textContent")?.contains("</script><img src=x"), "the name is not told");
    ensure_quiet(&mut browser)
}

#[test]
fn a_long_recording_is_unpacked_and_saved() -> Result<()> {
    let Some(mut browser) = browser()? else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    let file = opened(&mut browser, directory.path(), 1_600, false)?;
    ensure!(
        browser.value("document.getElementById('packed') !== null || document.getElementById('data') !== null")?
            == true
    );
    ensure_as_replayed(&mut browser, &file).context("all of it")?;
    // Series of the whole span come with the page, also if only some can be computed for a part.
    let cpus = "section[data-source=timerlat] table.series";
    let timerlat = replayed_timerlat(&file, &[])?;
    let rows = shown(&mut browser, cpus)?;
    ensure!(rows.len() == 2 && timerlat.series.len() == 2, "{rows:?}");
    for (row, series) in rows.iter().zip(&timerlat.series) {
        let of = &series.histograms["thread"];
        let figures = [of.count(), of.quantile_ns(0.5), of.quantile_ns(0.99), of.max_ns()].map(|of| of.to_string());
        ensure!(row.windows(4).any(|cells| cells == figures), "{row:?} has not {figures:?}");
    }
    let (left, top, width, height) = middle(&mut browser, "#first svg.heat")?;
    browser.drag((left + width * 0.3, top + height / 2.0), (left + width * 0.45, top + height / 2.0))?;
    ensure_as_replayed(&mut browser, &file).context("a part of it")?;
    let command = browser.text("document.getElementById('command').textContent")?;
    let words: Vec<&str> = command.split_whitespace().skip(3).collect();
    let timerlat = replayed_timerlat(&file, &words)?;
    let rows = shown(&mut browser, cpus)?;
    ensure!(rows.len() == 2 && timerlat.series.len() == 2, "{rows:?}");
    for (row, series) in rows.iter().zip(&timerlat.series) {
        // Counts and maxima are exact; percentiles are up to 12.5 % too high.
        let of = &series.histograms["thread"];
        let is_near =
            |cell: &str, ns: u64| cell.parse::<u64>().is_ok_and(|text| text >= ns && text as f64 <= ns as f64 * 1.125);
        let is_of = |cells: &[String]| {
            cells[0] == of.count().to_string()
                && is_near(&cells[1], of.quantile_ns(0.5))
                && is_near(&cells[2], of.quantile_ns(0.99))
                && cells[3] == of.max_ns().to_string()
        };
        ensure!(row.windows(4).any(is_of), "{row:?}: {of:?}");
    }
    // The button saves a recording.
    let downloads = json!({"behavior": "allow", "downloadPath": name(directory.path()), "eventsEnabled": false});
    browser.call("Browser.setDownloadBehavior", downloads)?;
    browser.value("document.getElementById('save').click()")?;
    let saved = directory.path().join("x.whylate");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !saved.exists() {
        ensure!(std::time::Instant::now() < deadline, "nothing is saved");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let output = whylate(&["replay", name(&saved)]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("WHAT WAITED"), "{said}");
    ensure_quiet(&mut browser)
}
