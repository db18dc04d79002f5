// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws panels on a screen: a pure function of the panels and the screen's size.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use unicode_width::UnicodeWidthStr as _;
use whylate_model::units::{counted, printable};

use super::panel::{Body, Choice, Panel, Row, cut, heights};
use super::state::{Mode, Phase, State};
use super::view_kind::ViewKind;
use crate::render::text::footer::per_second;
use crate::render::text::time_of_day::time_of_day;

/// Widths to which names shrink: before figures are hidden, and after.
const SHORT_NAME: usize = 28;
const MIN_NAME: usize = 8;
/// Minimum width of a column of details; below it, the last one is hidden.
const MIN_DETAILS: usize = 12;

/// Marks of columns of text.
const MARKS: [char; 3] = ['<', '~', '='];
/// Columns reserved for ` (+12)`, the count of hidden columns.
const HIDDEN_COUNT: usize = 6;

/// Draws the top view.
pub fn draw(frame: &mut Frame<'_>, state: &State) {
    let area = frame.area();
    if area.height < 3 || area.width < 10 {
        frame.render_widget(Line::raw("too small"), area);
        return;
    }
    let line = |y: u16| Rect { y, height: 1, ..area };
    frame.render_widget(header(state, usize::from(area.width)), line(0));
    frame.render_widget(footer(state, usize::from(area.width)), line(area.height - 1));
    let late = if state.has_colours { bold().fg(Color::Red) } else { bold() };
    let verdict = state.verdict();
    let style = if state.window.look.sources.iter().any(|source| source.is_late) { late } else { Style::new() };
    for (row, text) in verdict.iter().enumerate() {
        frame.render_widget(Line::styled(text.clone(), style), line(1 + row as u16));
    }
    let above = 1 + verdict.len() as u16;
    let body = Rect { y: above, height: area.height.saturating_sub(1 + above), ..area };
    let view = state.view();
    let focus = view.focus();
    let heights = heights(&view.panels, focus, body.height);
    let hidden: Vec<usize> = (0..heights.len()).filter(|&number| heights[number] == 0).collect();
    let mut y = body.y;
    for (number, (panel, height)) in view.panels.iter().zip(&heights).enumerate() {
        if *height > 0 {
            let is_focused = number == focus;
            let beside = if is_focused { hidden_titles(&view.panels, &hidden) } else { String::new() };
            draw_panel(
                frame,
                Rect { y, height: *height, ..body },
                panel,
                &view.choice(panel),
                is_focused.then_some(&beside),
                late,
            );
        }
        y += height;
    }
}

fn hidden_titles(panels: &[Panel], hidden: &[usize]) -> String {
    let titles: Vec<&str> =
        hidden.iter().map(|&number| panels[number].title.split([',', ';', ':']).next().unwrap_or("")).collect();
    if titles.is_empty() { String::new() } else { format!(" [Tab: {}]", titles.join(" | ")) }
}

fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn reversed() -> Style {
    Style::new().add_modifier(Modifier::REVERSED)
}

/// Joins parts while they fit, the most important ones first.
fn joined(parts: impl IntoIterator<Item = String>, columns: usize) -> String {
    let mut text = String::new();
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        let separator = if text.is_empty() { "" } else { "  " };
        if !text.is_empty() && text.width() + separator.len() + part.width() > columns {
            continue;
        }
        text = text + separator + &part;
    }
    text
}

fn header(state: &State, columns: usize) -> Line<'static> {
    let mode = match (&state.mode, state.is_frozen()) {
        (Mode::Replay(name), _) if state.is_playing() => format!("REPLAY {name} (playing)"),
        (Mode::Replay(name), _) => format!("REPLAY {name}"),
        (Mode::Live, true) => "FROZEN".to_owned(),
        (Mode::Live, false) if state.phase == Phase::Ended => "ENDED".to_owned(),
        (Mode::Live, false) => "LIVE".to_owned(),
    };
    let host = if state.window.header.host.is_empty() {
        "this machine".to_owned()
    } else {
        printable(&state.window.header.host)
    };
    let at = state.window.end_unix_ns().map_or_else(String::new, |ns| {
        time_of_day(ns, &state.window.zone).split('.').next().unwrap_or_default().to_owned()
    });
    let window = match state.window.range.is_empty() {
        true => String::new(),
        false => format!("last {}", short(state.window_ns() / 1_000_000_000)),
    };
    let look = &state.window.look;
    let lost = per_second(look.count_lost(), look.duration_ns).map_or_else(String::new, |rate| rate + " lost");
    let own = match state.mode {
        Mode::Live if state.own.resident_bytes > 0 => {
            let mebibytes = state.own.resident_bytes >> 20;
            format!("whylate {:.1}% CPU, {mebibytes} MiB", state.own.cpu * 100.0)
        }
        _ => String::new(),
    };
    let missed = if state.missed > 0 { format!("{} lost", counted(state.missed, "snapshot")) } else { String::new() };
    let namespace = state.window.header.pid_namespace.map_or_else(String::new, |_| "in a PID namespace".to_owned());
    let position = position(state, columns);
    let gap = if state.window.ticks().any(|tick| tick.has_gap()) { "with gaps".to_owned() } else { String::new() };
    // In a live session, evicted ticks were on the screen before.
    let is_cut = matches!(state.mode, Mode::Replay(_)) && state.window.history.forgotten() > 0;
    let cut = if is_cut { "start dropped (use --from or a larger --history)".to_owned() } else { String::new() };
    Line::styled(joined([mode, host, at, window, position, lost, gap, cut, own, missed, namespace], columns), bold())
}

/// Renders the titles of the views that lead to the current one; only the current one if there is no room for all.
fn position(state: &State, columns: usize) -> String {
    let titles = state.views().iter().skip(1).map(|view| title_of(&view.kind));
    let titles: Vec<String> = titles.filter(|title| !title.is_empty()).collect();
    let whole = titles.join(" > ");
    match titles.as_slice() {
        [] => String::new(),
        [_, .., last] if whole.width() > columns / 3 => format!("> .. > {last}"),
        _ => format!("> {whole}"),
    }
}

/// Formats seconds in the largest unit that divides them.
fn short(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

fn title_of(kind: &ViewKind) -> String {
    match kind {
        ViewKind::Overview => "overview".to_owned(),
        ViewKind::Source(name) => (*name).to_owned(),
        ViewKind::Series(_, labels) => printable(&labels.values().cloned().collect::<Vec<_>>().join(" ")),
        ViewKind::Frames(_, _, path) => {
            let key = path.split_terminator('\n').next_back().unwrap_or_default();
            printable(key.split_once(' ').map_or(key, |(_, name)| name))
        }
        ViewKind::Culprit(_, who) => printable(who),
        ViewKind::Event(source, ..) => format!("{source} event"),
        ViewKind::Program(program) => printable(&program.name(None)),
        ViewKind::Help => "help".to_owned(),
    }
}

fn footer(state: &State, columns: usize) -> Line<'static> {
    if let Some(typed) = &state.typing {
        return Line::raw(format!("/{}_", printable(typed)));
    }
    if !state.said.is_empty() {
        return Line::styled(printable(&state.said), bold());
    }
    if !state.problem.is_empty() {
        return Line::styled(printable(&state.problem), bold());
    }
    match &state.phase {
        Phase::Attaching(source) if source.is_empty() => return Line::raw("starting ..."),
        Phase::Attaching(source) => return Line::raw(format!("attaching {source} ...")),
        Phase::Running | Phase::Ended => {}
    }
    let filter = &state.view().filter;
    let filtered = if filter.is_empty() { String::new() } else { format!("only /{}", printable(filter)) };
    let freeze = match state.mode {
        Mode::Live if state.is_frozen() => "Space resume",
        Mode::Live => "Space freeze",
        Mode::Replay(_) if state.is_playing() => "Space pause",
        Mode::Replay(_) => "Space play",
    };
    let keys = [
        "? help",
        "q quit",
        "Enter open",
        "Esc back",
        "Tab panel",
        freeze,
        "/ filter",
        "s sort",
        "t T time",
        "[ ] span",
        "w save",
    ];
    Line::raw(joined(std::iter::once(filtered).chain(keys.map(str::to_owned)), columns))
}

/// Draws a panel. `focus` is set for the focused panel: the titles of panels without room, shown behind its own. `late`
/// is the style of late rows.
fn draw_panel(frame: &mut Frame<'_>, area: Rect, panel: &Panel, choice: &Choice, focus: Option<&String>, late: Style) {
    let is_focused = focus.is_some();
    let line = |row: u16| Rect { y: area.y + row, height: 1, ..area };
    let mark = if is_focused { "> " } else { "  " };
    let beside = focus.map_or("", String::as_str);
    let shown = usize::from(area.height.saturating_sub(1 + u16::from(!panel.rows().is_empty())));
    let more = panel.len().saturating_sub(shown);
    let more = if more > 0 { format!("  +{more} more") } else { String::new() };
    let room = usize::from(area.width).saturating_sub(mark.len() + more.width() + beside.width());
    let title = printable(&panel.title);
    let title = if title.width() > room { title.split([',', ';']).next().unwrap_or_default() } else { &title };
    let title = format!("{mark}{}{more}{beside}", cut(title, room.max(MIN_NAME)));
    frame.render_widget(Line::styled(title, if is_focused { bold() } else { Style::new() }), line(0));
    match &panel.body {
        Body::Text(lines) => {
            let from = choice.index.min(lines.len().saturating_sub(shown));
            for (row, text) in lines.iter().skip(from).take(shown).enumerate() {
                frame.render_widget(Line::raw(format!("  {}", printable(text))), line(1 + row as u16));
            }
        }
        Body::Table { rows, .. } if rows.is_empty() => {
            frame.render_widget(Line::raw(format!("  {}", panel.nothing)), line(1));
        }
        Body::Table { columns, rows } => {
            let chosen = choice.index_in(panel);
            // Scrolls only as far as the selected row needs.
            let from = chosen.saturating_sub(shown.saturating_sub(1)).min(rows.len().saturating_sub(shown));
            let rows = &rows[from..(from + shown).min(rows.len())];
            let columns = marked(columns, choice);
            let layout = Columns::new(&columns, rows, usize::from(area.width).saturating_sub(2));
            let heading = layout.heading(&columns);
            frame.render_widget(Line::raw(format!("  {heading}")), line(1));
            for (number, row) in rows.iter().enumerate() {
                let is_chosen = is_focused && from + number == chosen;
                let mark = if is_chosen { "> " } else { "  " };
                let style = match (is_chosen, row.is_late) {
                    (true, true) => reversed().patch(late),
                    (true, false) => reversed(),
                    (false, true) => late,
                    (false, false) => Style::new(),
                };
                let cells: Vec<String> = row.cells.iter().map(|cell| cell.text()).collect();
                let text = format!("{mark}{}", layout.line(&cells));
                frame.render_widget(Line::styled(text, style), line(2 + number as u16));
            }
        }
    }
}

/// Returns the names of columns, with a mark behind the one that rows are sorted by.
fn marked(names: &[String], choice: &Choice) -> Vec<String> {
    let mut names = names.to_vec();
    if let Some(name) = choice.sorted_by.and_then(|column| names.get_mut(column)) {
        name.push(if choice.is_reversed { '^' } else { '*' });
    }
    names
}

/// Layout of a table, in terminal columns.
struct Columns {
    widths: Vec<usize>,
    /// Left-aligned columns: names and details, which may be cut, and graphs, which may not.
    is_left: Vec<bool>,
    /// Number of columns that fit.
    shown: usize,
}

impl Columns {
    fn new(names: &[String], rows: &[Row], room: usize) -> Self {
        let is_left = names.iter().map(|name| name.starts_with(MARKS)).collect();
        let mut widths: Vec<usize> = names.iter().map(|name| name.trim_start_matches(MARKS).width()).collect();
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(&row.cells) {
                *width = (*width).max(cell.text().width());
            }
        }
        let natural = widths.clone();
        let mut shown = widths.len();
        // The heading needs room for the count of hidden columns.
        let total = |widths: &[usize], shown: usize| {
            let hidden = if shown < widths.len() { HIDDEN_COUNT } else { 0 };
            widths[..shown].iter().sum::<usize>() + 2 * shown.saturating_sub(1) + hidden
        };
        let narrow = |widths: &mut [usize], of: std::ops::Range<usize>, mark: char, least: usize| {
            let (is_marked, shown) = (|number: &usize| names[*number].starts_with(mark), of.end);
            // Columns shrink to the width of the screen at once, and step by step from there.
            of.clone().filter(is_marked).for_each(|number| widths[number] = widths[number].min(room.max(least)));
            while total(widths, shown) > room {
                let widest = of.clone().filter(is_marked).max_by_key(|&number| widths[number]);
                match widest.filter(|&number| widths[number] > least) {
                    Some(number) => widths[number] -= 1,
                    None => break,
                }
            }
        };
        // Details before figures are whole, or hidden with the figures behind them.
        let details = names.iter().rposition(|name| !name.starts_with('~')).map_or(0, |last| last + 1);
        narrow(&mut widths, details..shown, '~', MIN_DETAILS);
        while shown > details.max(1) && total(&widths, shown) > room {
            shown -= 1;
        }
        narrow(&mut widths, 0..shown, '<', SHORT_NAME);
        while shown > 1 && !names[shown - 1].starts_with('<') && total(&widths, shown) > room {
            shown -= 1;
        }
        narrow(&mut widths, 0..shown, '<', MIN_NAME);
        while shown > 1 && total(&widths, shown) > room {
            shown -= 1;
        }
        // Columns that were hidden afterwards leave room for names and details.
        let mut fits = widths.clone();
        for (number, natural) in natural.into_iter().enumerate().take(shown) {
            if names[number].starts_with(['<', '~']) {
                let room = room.saturating_sub(total(&fits, shown));
                fits[number] = natural.min(fits[number] + room).max(fits[number]);
            }
        }
        Columns { widths: fits, is_left, shown }
    }

    fn heading(&self, names: &[String]) -> String {
        let shown: Vec<String> = names.iter().map(|name| name.trim_start_matches(MARKS).to_owned()).collect();
        let left_out = names.len() - self.shown;
        let more = if left_out > 0 { format!(" (+{left_out})") } else { String::new() };
        self.line(&shown) + &more
    }

    fn line(&self, cells: &[String]) -> String {
        let mut line = String::new();
        for (number, cell) in cells.iter().take(self.shown).enumerate() {
            let width = self.widths[number];
            let cell = cut(cell, width);
            let padding = " ".repeat(width.saturating_sub(cell.width()));
            if number > 0 {
                line += "  ";
            }
            line += &if self.is_left[number] { cell + &padding } else { padding + &cell };
        }
        line.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::panel::Cell;

    #[test]
    fn details_are_cut_before_names_and_hidden_before_these_are() {
        let columns = ["SHARE", "<WHO", "~DELAYED"].map(str::to_owned);
        let text = |text: &str| Cell::Text(text.to_owned());
        let who = "interrupts off in whylate-irqsoff:343";
        let cells = vec![text("30.7%"), text(who), text("2 timers, 2 interrupts, worst 28.6ms")];
        let row = Row { key: String::new(), cells, is_late: false, opens: None };
        let at = |room| {
            let layout = Columns::new(&columns, std::slice::from_ref(&row), room);
            layout.line(&row.cells.iter().map(Cell::text).collect::<Vec<_>>())
        };
        assert_eq!(at(66), format!("30.7%  {who}  2 timers,..st 28.6ms"));
        assert_eq!(at(58), format!("30.7%  {who}  2 tim..8.6ms"));
        assert_eq!(at(57), format!("30.7%  {who}"));
        assert_eq!(at(38), "30.7%  interrupts o..irqsoff:343");
    }
}
