// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is shown: moments and keys change it, and nothing else does. Times come from moments, never from a clock.

use std::collections::BTreeMap;
use std::ops::Range;

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::look::{Found, Gatherer, Look};
use whylate_model::recording::{Header, Line};
use whylate_model::snapshot::Labels;
use whylate_model::sources::named;
use whylate_model::{Card, CauseKind};

use super::history::History;
use super::keys::Key;
use super::panel::{Choice, Glyphs, Panel};
use super::view;

/// How much of the past is shown at once, from which `[` and `]` choose.
const WINDOWS_S: [u64; 7] = [1, 10, 30, 60, 300, 900, 3600];
/// Of these the first.
const WINDOW: usize = 3;
/// How far a page goes where nobody has drawn one yet.
const PAGE: usize = 10;
/// No search is longer.
const LONGEST_FILTER: usize = 200;

/// What a view is of.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    Look,
    /// A source, by its name.
    Source(&'static str),
    /// One of its series.
    Series(&'static str, Labels),
    Culprit(CauseKind, String),
    /// A late event: its source, the number of its moment, and which of that moment's it is.
    Event(&'static str, u64, usize),
    Help,
}

/// Where moments come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    Live,
    /// A recording's name.
    Replay(String),
}

/// How far the feed is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    Attaching(String),
    Running,
    /// No more moments come, and why, if that is a failure.
    Ended,
}

/// What whylate itself takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Own {
    /// Of one CPU, a fraction of 1.
    pub cpu: f64,
    pub resident_bytes: u64,
}

/// What a key asks for that is not the screen's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reaction {
    Nothing,
    Quit,
    Suspend,
    Redraw,
    /// The moments that are shown are to be written to a recording.
    Write,
}

/// A screen, and what is chosen on it.
#[derive(Clone, Debug)]
pub struct View {
    pub what: What,
    pub panels: Vec<Panel>,
    pub choices: Vec<Choice>,
    pub focus: usize,
    pub filter: String,
}

impl View {
    fn of(what: What) -> Self {
        View { what, panels: Vec::new(), choices: Vec::new(), focus: 0, filter: String::new() }
    }

    /// The panel that keys go to, and what is chosen of it.
    fn focused(&mut self) -> Option<(&Panel, &mut Choice)> {
        Some((self.panels.get(self.focus)?, self.choices.get_mut(self.focus)?))
    }
}

#[derive(Debug)]
pub struct State {
    pub mode: Mode,
    pub phase: Phase,
    pub header: Header,
    pub own: Own,
    pub history: History,
    pub look: Look,
    /// Which of the history's moments are shown.
    pub window: Range<usize>,
    pub glyphs: Glyphs,
    /// What is late is red as well; words say it in any case.
    pub has_colours: bool,
    pub zone: TimeZone,
    /// What is typed behind `/`.
    pub typing: Option<String>,
    /// What there is to say, until the next key.
    pub said: String,
    /// Moments that the screen was too slow for.
    pub missed: u64,
    /// The number of the newest moment that is shown; `None` where it is the newest of all.
    at: Option<u64>,
    is_playing: bool,
    window_choice: usize,
    views: Vec<View>,
    columns: usize,
    page: usize,
}

impl State {
    /// Before anything was seen.
    pub fn new(mode: Mode, glyphs: Glyphs, zone: TimeZone, history: History) -> Self {
        State {
            mode,
            phase: Phase::Attaching(String::new()),
            header: Header::default(),
            own: Own::default(),
            history,
            look: Look::default(),
            window: 0..0,
            glyphs,
            has_colours: false,
            zone,
            typing: None,
            said: String::new(),
            missed: 0,
            at: None,
            is_playing: false,
            window_choice: WINDOW,
            views: vec![View::of(What::Look)],
            columns: 80,
            page: PAGE,
        }
    }

    /// How large the screen is.
    pub fn resize(&mut self, columns: usize, rows: usize) {
        self.page = (rows / 2).max(1);
        if columns != self.columns {
            self.columns = columns;
            self.show();
        }
    }

    /// What measures.
    pub fn begin(&mut self, header: Header) {
        self.header = header;
        self.phase = Phase::Running;
        self.refresh();
    }

    /// Takes the next moment.
    pub fn add(&mut self, lines: Vec<Line>) {
        if let Err(error) = self.history.add(lines) {
            self.said = format!("cannot keep what was seen: {error}");
        }
        // What is shown is the newest, or is gone, or stays as it is.
        let oldest = self.history.moments().front().map(|moment| moment.number);
        if let (Some(at), Some(oldest)) = (self.at, oldest)
            && at < oldest
        {
            self.at = Some(oldest);
            self.said = "what was frozen is older than what is kept: this is the oldest".to_owned();
            self.refresh();
        } else if self.at.is_none() {
            self.refresh();
        }
    }

    /// No more moments come.
    pub fn end(&mut self, problem: Option<String>) {
        self.phase = Phase::Ended;
        self.said = problem.unwrap_or_default();
    }

    /// The view on top.
    pub fn view(&self) -> &View {
        // There is always the first one.
        &self.views[self.views.len() - 1]
    }

    fn view_mut(&mut self) -> &mut View {
        let last = self.views.len() - 1;
        &mut self.views[last]
    }

    /// Every view from the first to the one on top.
    pub fn views(&self) -> &[View] {
        &self.views
    }

    pub fn window_ns(&self) -> u64 {
        WINDOWS_S[self.window_choice] * 1_000_000_000
    }

    /// Whether what is shown stays as it is.
    pub fn is_frozen(&self) -> bool {
        self.at.is_some()
    }

    /// Whether a recording goes on by itself.
    pub fn is_playing(&self) -> bool {
        self.is_playing
    }

    /// When what is shown ends, in nanoseconds since 1970.
    pub fn shown_unix_ns(&self) -> Option<u64> {
        let newest = self.window.end.checked_sub(1)?;
        self.history.moments().get(newest).map(|moment| moment.end_unix_ns)
    }

    /// The sources that measure.
    pub fn cards(&self) -> Vec<&'static Card> {
        self.header.sources.iter().filter_map(|of| named(&of.source)).collect()
    }

    /// The lines of what is shown, a moment each.
    pub fn shown_lines(&self) -> impl Iterator<Item = Vec<Line>> + '_ {
        self.history.moments().range(self.window.clone()).map(|moment| moment.lines())
    }

    /// A second of a recording has passed.
    pub fn play(&mut self) {
        if self.is_playing && !self.step_moment(1) {
            self.is_playing = false;
            self.said = "the recording ends here".to_owned();
        }
    }

    /// What somebody pressed.
    pub fn press(&mut self, key: Key) -> Reaction {
        self.said.clear();
        if let Some(typed) = self.typing.take() {
            return self.type_on(typed, key);
        }
        match key {
            Key::Interrupt | Key::Char('q') => return Reaction::Quit,
            Key::Suspend => return Reaction::Suspend,
            Key::Redraw => return Reaction::Redraw,
            Key::Char('w') if self.history.newest().is_none() => self.said = "nothing was seen yet".to_owned(),
            Key::Char('w') => return Reaction::Write,
            Key::Char('?') if self.view().what != What::Help => self.open(What::Help),
            Key::Char('/') => self.typing = Some(self.view().filter.clone()),
            Key::Enter | Key::Right | Key::Char('l') => self.open_chosen(),
            Key::Esc | Key::Left | Key::Char('h' | '?') | Key::Backspace => self.back(key),
            Key::Tab => self.turn_to(1),
            Key::BackTab => self.turn_to(-1),
            Key::Up | Key::Char('k') => self.step(-1),
            Key::Down | Key::Char('j') => self.step(1),
            Key::PageUp => self.step(-(self.page as isize)),
            Key::PageDown => self.step(self.page as isize),
            Key::Home | Key::Char('g') => self.step(isize::MIN / 2),
            Key::End | Key::Char('G') => self.step(isize::MAX / 2),
            Key::Char('s') => self.sort(|panel, choice| choice.sort_on(panel)),
            Key::Char('I') => self.sort(|_, choice| choice.is_reversed = !choice.is_reversed),
            Key::Char(' ') => self.freeze_or_go_on(),
            Key::Char('t') => self.step_by_hand(1),
            Key::Char('T') => self.step_by_hand(-1),
            Key::Char('[') => self.widen(-1),
            Key::Char(']') => self.widen(1),
            Key::Char(_) => self.said = "? shows the keys".to_owned(),
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
            Key::Char(character) if typed.len() < LONGEST_FILTER => typed.push(character),
            _ => {}
        }
        self.view_mut().filter.clone_from(&typed);
        self.typing = (key != Key::Esc).then_some(typed);
        self.show();
        Reaction::Nothing
    }

    fn open(&mut self, what: What) {
        self.views.push(View::of(what));
        self.show();
        // There may be nothing to choose from at the top.
        let view = self.view_mut();
        view.focus = view.panels.iter().position(|panel| panel.len() > 0).unwrap_or(0);
    }

    fn open_chosen(&mut self) {
        let view = self.view();
        let (Some(panel), Some(choice)) = (view.panels.get(view.focus), view.choices.get(view.focus)) else { return };
        match panel.rows().get(choice.place_in(panel)).and_then(|row| row.opens.clone()) {
            Some(what) => self.open(what),
            None => self.said = "there is no more to say of this".to_owned(),
        }
    }

    fn back(&mut self, key: Key) {
        if !self.view().filter.is_empty() && key == Key::Esc {
            self.view_mut().filter.clear();
        } else if self.views.len() > 1 {
            self.views.pop();
        } else if key == Key::Esc {
            self.said = "q quits".to_owned();
        }
        self.show();
    }

    fn turn_to(&mut self, by: isize) {
        let view = self.view_mut();
        let count = view.panels.len().max(1) as isize;
        view.focus = (view.focus as isize + by).rem_euclid(count) as usize;
        self.show();
        // Whoever comes here has seen which row is the first.
        self.step(0);
    }

    fn step(&mut self, by: isize) {
        if let Some((panel, choice)) = self.view_mut().focused() {
            choice.step(panel, by);
        }
    }

    fn sort(&mut self, change: impl FnOnce(&Panel, &mut Choice)) {
        if let Some((panel, choice)) = self.view_mut().focused() {
            change(panel, choice);
        }
        self.show();
    }

    fn freeze_or_go_on(&mut self) {
        if matches!(self.mode, Mode::Replay(_)) {
            self.is_playing = !self.is_playing;
            return;
        }
        self.at = match self.at {
            Some(_) => None,
            None => self.history.newest(),
        };
        self.refresh();
    }

    fn step_by_hand(&mut self, by: i64) {
        self.is_playing = false;
        if !self.step_moment(by) {
            let end = if by > 0 { "this is the newest" } else { "this is the oldest that is kept" };
            self.said = end.to_owned();
        }
    }

    /// Shows another moment, and false where there is none.
    fn step_moment(&mut self, by: i64) -> bool {
        let Some(now) = self.at.or(self.history.newest()) else { return false };
        let Some(next) = now.checked_add_signed(by).filter(|&next| self.history.get(next).is_some()) else {
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

    /// Looks at the moments that are to be shown.
    fn refresh(&mut self) {
        let Some(newest) = self.at.or(self.history.newest()) else { return self.show() };
        self.window = self.history.window(newest, self.window_ns());
        let mut gatherer = Gatherer::of(self.cards(), By::Culprit);
        let mut found: Vec<Found<'static>> = Vec::new();
        let mut lost: BTreeMap<String, u64> = BTreeMap::new();
        for moment in self.history.moments().range(self.window.clone()) {
            for (card, event) in &moment.late {
                gatherer.add(card, event.clone());
            }
            for of in &moment.found {
                match found.iter_mut().find(|sum| sum.card.name == of.card.name) {
                    Some(sum) => sum.add(of),
                    None => found.push(of.clone()),
                }
            }
            for (reason, count) in &moment.lost {
                let lost = lost.entry(reason.clone()).or_default();
                *lost = lost.saturating_add(*count);
            }
        }
        let look = gatherer.finish_with(&found, self.header.unmeasured.clone());
        self.look = Look { lost, weaker: self.header.weaker.clone(), ..look };
        self.show();
    }

    /// Makes the panels of the view on top.
    fn show(&mut self) {
        let last = self.views.len() - 1;
        let mut panels = view::panels(self, &self.views[last].what, self.columns);
        let view = &mut self.views[last];
        view.choices.resize(panels.len(), Choice::default());
        view.focus = view.focus.min(panels.len().saturating_sub(1));
        for (number, (panel, choice)) in panels.iter_mut().zip(&mut view.choices).enumerate() {
            panel.arrange(choice, if number == view.focus { &view.filter } else { "" });
            choice.follow(panel);
        }
        view.panels = panels;
    }
}
