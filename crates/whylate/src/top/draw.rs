// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws panels on a screen: a pure function of the panels and the screen's size.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use unicode_width::UnicodeWidthStr as _;
use whylate_model::units::printable;

use super::panel::{Body, Choice, Panel, Row, cut, heights};
use super::state::{Mode, Phase, State};
use super::view_kind::ViewKind;
use crate::render::text::overview::count_lost;
use crate::render::text::time_of_day::time_of_day;
use whylate_model::units::counted;

/// Minimum width of a name column when the screen is too narrow.
const MIN_NAME: usize = 8;

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
    let body = Rect { y: 1, height: area.height - 2, ..area };
    let view = state.view();
    let focus = view.focus();
    let heights = heights(&view.panels, focus, body.height);
    let hidden: Vec<usize> = (0..heights.len()).filter(|&number| heights[number] == 0).collect();
    let mut y = body.y;
    for (number, (panel, height)) in view.panels.iter().zip(&heights).enumerate() {
        if *height > 0 {
            let is_focused = number == focus;
            let beside = if is_focused { hidden_titles(&view.panels, &hidden) } else { String::new() };
            let late = if state.has_colours { bold().fg(Color::Red) } else { bold() };
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
    let lost = count_lost(&state.window.look);
    let lost = if lost > 0 { format!("{} lost", counted(lost, "event")) } else { String::new() };
    let own = match state.mode {
        Mode::Live if state.own.resident_bytes > 0 => {
            let mebibytes = state.own.resident_bytes >> 20;
            format!("whylate {:.1}% CPU, {mebibytes} MiB", state.own.cpu * 100.0)
        }
        _ => String::new(),
    };
    let missed = if state.missed > 0 { format!("{} lost", counted(state.missed, "snapshot")) } else { String::new() };
    let namespace = state.window.header.pid_namespace.map_or_else(String::new, |_| "in a PID namespace".to_owned());
    let position: Vec<String> = state.views().iter().skip(1).map(|view| title_of(&view.kind)).collect();
    let position = if position.is_empty() { String::new() } else { format!("> {}", position.join(" > ")) };
    let gap = if state.window.ticks().any(|tick| tick.has_gap()) { "with gaps".to_owned() } else { String::new() };
    // In a live session, evicted ticks were on the screen before.
    let is_cut = matches!(state.mode, Mode::Replay(_)) && state.window.history.forgotten() > 0;
    let cut = if is_cut { "start dropped (use --from or a larger --history)".to_owned() } else { String::new() };
    Line::styled(joined([mode, host, at, window, position, lost, gap, cut, own, missed, namespace], columns), bold())
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
        ViewKind::Overview => "look".to_owned(),
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
    let room = usize::from(area.width).saturating_sub(mark.len() + beside.width());
    let title = format!("{mark}{}{beside}", cut(&printable(&panel.title), room.max(MIN_NAME)));
    frame.render_widget(Line::styled(title, if is_focused { bold() } else { Style::new() }), line(0));
    match &panel.body {
        Body::Text(lines) => {
            let shown = usize::from(area.height - 1);
            let from = choice.index.min(lines.len().saturating_sub(shown));
            for (row, text) in lines.iter().skip(from).take(shown).enumerate() {
                frame.render_widget(Line::raw(format!("  {}", printable(text))), line(1 + row as u16));
            }
        }
        Body::Table { rows, .. } if rows.is_empty() => {
            frame.render_widget(Line::raw(format!("  {}", panel.nothing)), line(1));
        }
        Body::Table { columns, rows } => {
            let shown = usize::from(area.height.saturating_sub(2));
            let chosen = choice.index_in(panel);
            // Scrolls only as far as the selected row needs.
            let from = chosen.saturating_sub(shown.saturating_sub(1)).min(rows.len().saturating_sub(shown));
            let rows = &rows[from..(from + shown).min(rows.len())];
            let layout = Columns::new(columns, rows, usize::from(area.width).saturating_sub(2));
            let heading = layout.heading(columns, choice);
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

/// Layout of a table, in terminal columns.
struct Columns {
    widths: Vec<usize>,
    /// Left-aligned columns: names, which may be cut, and graphs, which may not.
    is_left: Vec<bool>,
    /// Number of columns that fit.
    shown: usize,
}

impl Columns {
    fn new(names: &[String], rows: &[Row], room: usize) -> Self {
        let is_name: Vec<bool> = names.iter().map(|name| name.starts_with('<')).collect();
        let is_left = names.iter().map(|name| name.starts_with(['<', '='])).collect();
        let mut widths: Vec<usize> = names.iter().map(|name| name.trim_start_matches(['<', '=']).width()).collect();
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(&row.cells) {
                *width = (*width).max(cell.text().width());
            }
        }
        let total = |widths: &[usize]| widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        // Names shrink to the width of the screen at once, and step by step from there.
        for (width, _) in widths.iter_mut().zip(&is_name).filter(|(_, is_name)| **is_name) {
            *width = (*width).min(room.max(MIN_NAME));
        }
        while total(&widths) > room {
            let widest = widths.iter_mut().zip(&is_name).filter(|(_, is_name)| **is_name).map(|(width, _)| width);
            match widest.max_by_key(|width| **width).filter(|width| **width > MIN_NAME) {
                Some(width) => *width -= 1,
                None => break,
            }
        }
        let mut shown = widths.len();
        if total(&widths) > room {
            // The title needs room for the count of hidden columns.
            while shown > 1 && total(&widths[..shown]) + HIDDEN_COUNT > room {
                shown -= 1;
            }
        }
        Columns { widths, is_left, shown }
    }

    fn heading(&self, names: &[String], choice: &Choice) -> String {
        let names: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(number, name)| {
                let mark = match (choice.sorted_by == Some(number), choice.is_reversed) {
                    (false, _) => "",
                    (true, false) => "*",
                    (true, true) => "^",
                };
                format!("{}{mark}", name.trim_start_matches(['<', '=']))
            })
            .collect();
        let left_out = names.len() - self.shown;
        let more = if left_out > 0 { format!(" (+{left_out})") } else { String::new() };
        self.line(&names) + &more
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
