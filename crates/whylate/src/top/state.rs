// SPDX-License-Identifier: MIT OR Apache-2.0
//! State of the screen. Only ticks and keys change it; all times come from ticks, never from a clock.

use std::collections::BTreeMap;

use jiff::tz::TimeZone;
use whylate_model::overview::{Gatherer, Overview, SourceSummary};
use whylate_model::recording::{Header, Line};

use super::history::History;
use super::keys::Key;
use super::panel::{Body, Choice, Glyphs, Panel, heights};
use super::program_filter::ProgramFilter;
use super::view;
use super::view_kind::ViewKind;
use super::window::Window;
use crate::render::text::fit::fitted;
use crate::render::text::overview::Sentences;
use crate::store::play::kept_message;

/// Reason of a gap: the screen was too slow for the ticks.
pub const SLOW_SCREEN: &str = "slow_screen";
/// Window lengths in seconds, chosen with `[` and `]`.
const WINDOWS_S: [u64; 7] = [1, 10, 30, 60, 300, 900, 3600];
/// Index into `WINDOWS_S` of the initial window.
const INITIAL_WINDOW: usize = 3;
/// Number of ticks from which the absence of late events means something.
const STARTED_AFTER: u64 = 2;
/// Minimum number of rows of a screen for a line of the verdict, and for two.
const MIN_VERDICT_ROWS: usize = 8;
const TWO_VERDICT_ROWS: usize = 20;
/// Maximum depth of nested views.
const MAX_VIEWS: usize = 16;
/// Maximum length of a filter in bytes.
const MAX_FILTER: usize = 200;

/// Origin of the ticks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    Live,
    /// Name of the recording.
    Replay(String),
}

/// Progress of the feed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    Attaching(String),
    Running,
    /// No more ticks arrive; `State::problem` gives the reason after a failure.
    Ended,
}

/// Resource usage of whylate itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Own {
    /// CPU time per wall time: 1 is one full CPU.
    pub cpu: f64,
    pub resident_bytes: u64,
}

/// Action that a key asks the caller for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    Nothing,
    Quit,
    Suspend,
    Redraw,
    /// Write the shown ticks to a recording.
    Write,
}

/// One level of the view stack, with its selections.
#[derive(Clone, Debug)]
pub struct View {
    pub kind: ViewKind,
    pub panels: Vec<Panel>,
    /// Selections by panel id. A panel may disappear and come back.
    choices: BTreeMap<&'static str, Choice>,
    focus: Option<&'static str>,
    pub filter: String,
}

impl View {
    fn new(kind: ViewKind) -> Self {
        View { kind, panels: Vec::new(), choices: BTreeMap::new(), focus: None, filter: String::new() }
    }

    /// Returns the index of the focused panel; before any was focused, the first that is not empty.
    pub fn focus(&self) -> usize {
        let chosen = self.focus.and_then(|id| self.panels.iter().position(|panel| panel.id == id));
        chosen.or_else(|| self.panels.iter().position(|panel| panel.len() > 0)).unwrap_or(0)
    }

    /// Returns the selection in a panel.
    pub fn choice(&self, panel: &Panel) -> Choice {
        self.choices.get(panel.id).cloned().unwrap_or_default()
    }

    /// Changes the selection in the focused panel.
    fn choose(&mut self, change: impl FnOnce(&Panel, &mut Choice)) {
        if let Some(panel) = self.panels.get(self.focus()) {
            change(panel, self.choices.entry(panel.id).or_default());
        }
    }
}

#[derive(Debug)]
pub struct State {
    pub mode: Mode,
    pub phase: Phase,
    pub own: Own,
    pub window: Window,
    /// Whether late values are also red. Text marks them in any case.
    pub has_colours: bool,
    /// Filter being typed after `/`.
    pub typing: Option<String>,
    /// Message in the footer, until the next key.
    pub said: String,
    /// Error of the feed; empty if it did not fail.
    pub problem: String,
    /// Snapshots dropped because the screen was too slow.
    pub missed: u64,
    /// Sequence number of the newest shown tick while frozen; `None` follows the newest.
    at: Option<u64>,
    is_playing: bool,
    window_choice: usize,
    views: Vec<View>,
    columns: usize,
    rows: usize,
    /// Ticks were added since the last refresh.
    is_stale: bool,
    /// The ticks come from the sources attached so far, not from all.
    is_early: bool,
    /// Number of ticks of these sources so far.
    ticks: u64,
}

impl State {
    /// Creates the state before the first tick.
    pub fn new(mode: Mode, glyphs: Glyphs, zone: TimeZone, history: History) -> Self {
        State {
            mode,
            phase: Phase::Attaching(String::new()),
            own: Own::default(),
            window: Window::new(history, glyphs, zone),
            has_colours: false,
            typing: None,
            said: String::new(),
            problem: String::new(),
            missed: 0,
            at: None,
            is_playing: false,
            window_choice: INITIAL_WINDOW,
            views: vec![View::new(ViewKind::Overview)],
            columns: 80,
            rows: 24,
            is_stale: false,
            is_early: false,
            ticks: 0,
        }
    }

    /// Sets the screen size in columns and rows.
    pub fn resize(&mut self, columns: usize, rows: usize) {
        self.rows = rows;
        if columns != self.columns {
            self.columns = columns;
            self.show();
        }
    }

    /// Takes the header once all sources are attached, or a recording is opened.
    pub fn start(&mut self, header: Header) {
        self.window.header = header;
        self.phase = Phase::Running;
        self.refresh();
    }

    /// Adds a tick of the sources attached so far. The first full tick replaces these.
    pub fn add_early(&mut self, header: Header, lines: Vec<Line>) {
        self.window.header = header;
        self.add(lines);
        self.is_early = true;
    }

    /// Returns whether a tick of all sources has arrived.
    pub fn has_started(&self) -> bool {
        self.window.history.newest().is_some() && !self.is_early
    }

    /// Returns whether the sources had no time for results yet.
    fn is_starting(&self) -> bool {
        let is_measuring = self.mode == Mode::Live && self.phase != Phase::Ended;
        is_measuring && (self.is_early || self.ticks < STARTED_AFTER)
    }

    /// Adds a tick; [`State::settle`] shows it.
    pub fn add(&mut self, lines: Vec<Line>) {
        if std::mem::take(&mut self.is_early) && self.phase == Phase::Running {
            self.window.history.clear();
            self.ticks = 0;
        }
        self.ticks += 1;
        for line in &lines {
            if let (Line::Gap(gap), Mode::Live) = (line, &self.mode)
                && gap.reason == SLOW_SCREEN
            {
                self.missed = self.missed.saturating_add(gap.count);
            }
            if let Line::Kept(kept) = line {
                self.said = kept_message(kept);
            }
        }
        if let Err(error) = self.window.history.add(lines) {
            self.said = format!("cannot keep the snapshot: {error}");
        }
        self.is_stale = true;
    }

    /// Refreshes the view after ticks were added.
    pub fn settle(&mut self) {
        if !std::mem::take(&mut self.is_stale) {
            return;
        }
        let oldest = self.window.history.forgotten();
        if self.at.is_some_and(|at| at < oldest) {
            self.at = Some(oldest);
            self.said = "the frozen snapshot is no longer kept: this is the oldest".to_owned();
        }
        // A frozen window is refreshed only if ticks of it were evicted.
        if self.at.is_none() || self.window.range.start < oldest {
            self.refresh();
        }
    }

    /// Marks the feed as ended.
    pub fn end(&mut self, problem: Option<String>) {
        self.phase = Phase::Ended;
        self.problem = problem.unwrap_or_default();
        self.settle();
    }

    /// Returns the top of the view stack.
    pub fn view(&self) -> &View {
        // The stack is never empty: the overview is never popped.
        &self.views[self.views.len() - 1]
    }

    fn view_mut(&mut self) -> &mut View {
        let last = self.views.len() - 1;
        &mut self.views[last]
    }

    /// Returns the view stack from the bottom.
    pub fn views(&self) -> &[View] {
        &self.views
    }

    /// Returns the lines of the verdict, which stand below the header of the overview.
    pub fn verdict(&self) -> Vec<String> {
        let look = &self.window.look;
        let most = match self.rows {
            ..MIN_VERDICT_ROWS => 0,
            MIN_VERDICT_ROWS..TWO_VERDICT_ROWS => 1,
            _ => 2,
        };
        let has_none = look.sources.is_empty() || self.window.is_starting;
        if self.view().kind != ViewKind::Overview || has_none {
            return Vec::new();
        }
        let verdict = Sentences::new(&look.verdict());
        let mut lines = fitted(&verdict.to_string(), self.columns);
        if lines.len() > most {
            let mut shorter = verdict.shortened().map(|text| fitted(&text, self.columns));
            lines = shorter
                .find(|lines| lines.len() <= most)
                // The main culprit is in the first row below.
                .unwrap_or_else(|| fitted(&verdict.first(), self.columns));
        }
        if lines.len() > most {
            lines.truncate(most);
            let last = lines.pop().unwrap_or_default();
            let room = self.columns.saturating_sub(" ...".len());
            let words = last.char_indices().rfind(|(at, c)| *c == ' ' && *at <= room);
            lines.extend((most > 0).then(|| format!("{} ...", &last[..words.map_or(0, |(at, _)| at)])));
        }
        lines
    }

    pub fn window_ns(&self) -> u64 {
        WINDOWS_S[self.window_choice] * 1_000_000_000
    }

    /// Returns whether the window is frozen.
    pub fn is_frozen(&self) -> bool {
        self.at.is_some()
    }

    /// Returns whether a recording is being played.
    pub fn is_playing(&self) -> bool {
        self.is_playing
    }

    /// Advances a playing recording by one tick.
    pub fn play(&mut self) {
        if self.is_playing && !self.step_ticks(1) {
            self.is_playing = false;
            self.said = "the recording ends here".to_owned();
        }
    }

    /// Handles a key.
    pub fn press(&mut self, key: Key) -> Reaction {
        self.said.clear();
        if let Some(typed) = self.typing.take() {
            return self.type_on(typed, key);
        }
        match key {
            Key::Interrupt | Key::Char('q') => return Reaction::Quit,
            Key::Suspend => return Reaction::Suspend,
            Key::Redraw => return Reaction::Redraw,
            Key::Char('w') if self.window.history.newest().is_none() => self.said = "nothing to save yet".to_owned(),
            Key::Char('w') => return Reaction::Write,
            Key::Char('?') if self.view().kind != ViewKind::Help => self.open(ViewKind::Help),
            Key::Char('/') => self.typing = Some(self.view().filter.clone()),
            Key::Enter | Key::Right | Key::Char('l') => self.open_selected(),
            Key::Esc | Key::Left | Key::Char('h' | '?') | Key::Backspace => self.back(key),
            Key::Tab => self.turn_to(1),
            Key::BackTab => self.turn_to(-1),
            Key::Up | Key::Char('k') => self.step(-1),
            Key::Down | Key::Char('j') => self.step(1),
            Key::PageUp => self.step(-self.page()),
            Key::PageDown => self.step(self.page()),
            Key::Home | Key::Char('g') => self.step(isize::MIN / 2),
            Key::End | Key::Char('G') => self.step(isize::MAX / 2),
            Key::Char('s') => self.sort(|panel, choice| choice.sort_on(panel)),
            Key::Char('I') => self.sort(|_, choice| choice.is_reversed = !choice.is_reversed),
            Key::Char(' ') => self.toggle_freeze(),
            Key::Char('t') => self.step_paused(1),
            Key::Char('T') => self.step_paused(-1),
            Key::Char('[') => self.widen(-1),
            Key::Char(']') => self.widen(1),
            Key::Char(_) => self.said = "press ? for help".to_owned(),
        }
        Reaction::Nothing
    }

    fn type_on(&mut self, mut typed: String, key: Key) -> Reaction {
        match key {
            Key::Interrupt => return Reaction::Quit,
            Key::Esc => typed.clear(),
            Key::Enter => {
                self.show();
                return Reaction::Nothing;
            }
            Key::Backspace => drop(typed.pop()),
            Key::Char(character) if typed.len() < MAX_FILTER => typed.push(character),
            _ => {}
        }
        self.view_mut().filter.clone_from(&typed);
        self.typing = (key != Key::Esc).then_some(typed);
        self.show();
        Reaction::Nothing
    }

    /// Opens the view of one program; Esc leads to the overview.
    pub fn open_program(&mut self, program: ProgramFilter) {
        self.open(ViewKind::Program(program));
    }

    /// Opens a view, or returns to it if it is already on the stack.
    pub fn open(&mut self, kind: ViewKind) {
        let before = self.views.iter().position(|view| view.kind == kind);
        if before.is_none() && self.views.len() >= MAX_VIEWS {
            self.said = "cannot open more views (press Esc to go back)".to_owned();
            return;
        }
        // The panels are built again when the view is on top.
        self.view_mut().panels.clear();
        match before {
            Some(index) => self.views.truncate(index + 1),
            None => self.views.push(View::new(kind)),
        }
        self.show();
        self.step(0);
    }

    fn open_selected(&mut self) {
        let view = self.view();
        let Some(panel) = view.panels.get(view.focus()) else { return };
        let choice = view.choice(panel);
        match panel.rows().get(choice.index_in(panel)).and_then(|row| row.opens.clone()) {
            Some(kind) => self.open(kind),
            None => self.said = "this row has no details".to_owned(),
        }
    }

    fn back(&mut self, key: Key) {
        if !self.view().filter.is_empty() && key == Key::Esc {
            self.view_mut().filter.clear();
        } else if self.views.len() > 1 {
            self.views.pop();
        } else if key == Key::Esc {
            self.said = "press q to quit".to_owned();
        }
        self.show();
    }

    fn turn_to(&mut self, by: isize) {
        let view = self.view_mut();
        let count = view.panels.len().max(1) as isize;
        let focus = (view.focus() as isize + by).rem_euclid(count) as usize;
        view.focus = view.panels.get(focus).map(|panel| panel.id);
        self.show();
        // Turning to a panel selects its current row.
        self.step(0);
    }

    fn step(&mut self, by: isize) {
        // The header and the footer take a line each.
        let room = u16::try_from(self.rows.saturating_sub(2 + self.verdict().len())).unwrap_or(u16::MAX);
        let view = self.view_mut();
        let focus = view.focus();
        let shown = heights(&view.panels, focus, room).get(focus).map_or(0, |height| usize::from(*height));
        // The panel keeps the focus when one above it is no longer empty.
        view.focus = view.panels.get(focus).map(|panel| panel.id).or(view.focus);
        view.choose(|panel, choice| {
            choice.step(panel, by);
            // Text scrolls no further than to its last line at the bottom, below the title.
            if matches!(panel.body, Body::Text(_)) {
                choice.index = choice.index.min(panel.len().saturating_sub(shown.saturating_sub(1)));
            }
        });
    }

    /// Returns the rows that a page key moves.
    fn page(&self) -> isize {
        (self.rows / 2).max(1) as isize
    }

    fn sort(&mut self, change: impl FnOnce(&Panel, &mut Choice)) {
        self.view_mut().choose(change);
        self.show();
    }

    fn toggle_freeze(&mut self) {
        if matches!(self.mode, Mode::Replay(_)) {
            self.is_playing = !self.is_playing;
            return;
        }
        self.at = match self.at {
            Some(_) => None,
            None => self.window.history.newest(),
        };
        self.refresh();
    }

    fn step_paused(&mut self, by: i64) {
        self.is_playing = false;
        if !self.step_ticks(by) {
            let end = if by > 0 { "this is the newest" } else { "this is the oldest one kept" };
            self.said = end.to_owned();
        }
    }

    /// Moves the window by `by` ticks. Returns false if there is no such tick.
    fn step_ticks(&mut self, by: i64) -> bool {
        let Some(now) = self.at.or(self.window.history.newest()) else { return false };
        let Some(next) = now.checked_add_signed(by).filter(|&next| self.window.history.get(next).is_some()) else {
            return false;
        };
        self.at = Some(next);
        self.refresh();
        true
    }

    fn widen(&mut self, by: isize) {
        self.window_choice = self.window_choice.saturating_add_signed(by).min(WINDOWS_S.len() - 1);
        self.refresh();
    }

    /// Rebuilds the overview from the shown ticks.
    fn refresh(&mut self) {
        self.window.is_starting = self.is_starting();
        let Some(newest) = self.at.or(self.window.history.newest()) else { return self.show() };
        self.window.range = self.window.history.window(newest, self.window_ns());
        let mut gatherer = Gatherer::for_cards(self.window.cards(), self.window.rank_by);
        let mut found: Vec<SourceSummary<'static>> = Vec::new();
        let mut lost: BTreeMap<String, u64> = BTreeMap::new();
        for tick in self.window.ticks() {
            for (card, event) in &tick.late {
                gatherer.add_kept(card, event);
            }
            for of in &tick.summaries {
                match found.iter_mut().find(|sum| sum.card.name == of.card.name) {
                    Some(sum) => sum.add(of),
                    None => found.push(of.clone()),
                }
            }
            for (reason, count) in &tick.lost {
                let lost = lost.entry(reason.clone()).or_default();
                *lost = lost.saturating_add(*count);
            }
        }
        for of in found.iter_mut().filter(|of| of.has_remark()) {
            if let Some(snapshot) = self.window.history.merged(&self.window.range, of.card) {
                of.remark_on(&snapshot);
            }
        }
        let mut unmeasured = self.window.header.unmeasured.clone();
        unmeasured.extend(SourceSummary::set_aside(&mut found, &self.window.header.sources));
        let look = gatherer.finish_with(&found, unmeasured);
        self.window.look = Overview { lost, limitations: self.window.header.limitations.clone(), ..look };
        self.show();
    }

    /// Builds the panels of the top view.
    fn show(&mut self) {
        let last = self.views.len() - 1;
        let panels = view::panels(&self.window, &self.views[last].kind, self.columns);
        let view = &mut self.views[last];
        view.panels = panels;
        let focus = view.focus();
        for (number, panel) in view.panels.iter_mut().enumerate() {
            let choice = view.choices.entry(panel.id).or_default();
            panel.arrange(choice, if number == focus { &view.filter } else { "" });
            choice.follow(panel);
        }
    }
}
