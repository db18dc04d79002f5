// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is shown: moments and keys change it, and nothing else does. Times come from moments, never from a clock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::look::{Found, Gatherer, Look};
use whylate_model::recording::{Header, Line};
use whylate_model::snapshot::Labels;
use whylate_model::sources::named;
use whylate_model::{Card, CauseKind, LateEvent, Snapshot};

use super::feed::SLOW_SCREEN;
use super::history::{History, Moment};
use super::keys::Key;
use super::panel::{Body, Choice, Glyphs, Panel, heights};
use super::view;
use super::whose::{Stacks, Whose};

/// How much of the past is shown at once, from which `[` and `]` choose.
const WINDOWS_S: [u64; 7] = [1, 10, 30, 60, 300, 900, 3600];
/// Of these the first.
const WINDOW: usize = 3;
/// No more views are opened from each other.
const DEEPEST: usize = 16;
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
    /// What a frame of a source's stacks called, by its key and those of its callers.
    Frames(&'static str, Stacks, String),
    /// Somebody who made others late; without a number, all threads of that name.
    Culprit(CauseKind, String),
    /// A late event: its source, the number of its moment, and which of that moment's it is.
    Event(&'static str, u64, usize),
    /// A program, or threads.
    Program(Whose),
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
    /// By the panel, which may be gone for a while.
    choices: BTreeMap<&'static str, Choice>,
    focus: Option<&'static str>,
    pub filter: String,
}

impl View {
    fn of(what: What) -> Self {
        View { what, panels: Vec::new(), choices: BTreeMap::new(), focus: None, filter: String::new() }
    }

    /// The place of the panel that keys go to: where nobody has turned to one yet, the first that has something.
    pub fn focus(&self) -> usize {
        let chosen = self.focus.and_then(|id| self.panels.iter().position(|panel| panel.id == id));
        chosen.or_else(|| self.panels.iter().position(|panel| panel.len() > 0)).unwrap_or(0)
    }

    /// What is chosen of a panel.
    pub fn choice(&self, panel: &Panel) -> Choice {
        self.choices.get(panel.id).cloned().unwrap_or_default()
    }

    /// Changes what is chosen of the panel that keys go to.
    fn choose(&mut self, change: impl FnOnce(&Panel, &mut Choice)) {
        if let Some(panel) = self.panels.get(self.focus()) {
            change(panel, self.choices.entry(panel.id).or_default());
        }
    }
}

/// What one source saw in some moments.
type Merged = (&'static str, Range<u64>, Rc<Snapshot>);

#[derive(Debug)]
pub struct State {
    pub mode: Mode,
    pub phase: Phase,
    pub header: Header,
    pub own: Own,
    pub history: History,
    pub look: Look,
    /// The numbers of the moments that are shown.
    pub window: Range<u64>,
    pub glyphs: Glyphs,
    /// What is late is red as well; words say it in any case.
    pub has_colours: bool,
    pub zone: TimeZone,
    /// What is typed behind `/`.
    pub typing: Option<String>,
    /// What there is to say, until the next key.
    pub said: String,
    /// Why nothing more comes, where that is a failure.
    pub problem: String,
    /// Snapshots that the screen was too slow for.
    pub missed: u64,
    /// The number of the newest moment that is shown; `None` where it is the newest of all.
    at: Option<u64>,
    is_playing: bool,
    window_choice: usize,
    views: Vec<View>,
    columns: usize,
    rows: usize,
    /// Moments have come that were not looked at.
    is_stale: bool,
    /// The moments that are there are not of all sources.
    is_early: bool,
    /// What was merged last: most keys change nothing of it.
    merged: RefCell<Option<Merged>>,
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
            problem: String::new(),
            missed: 0,
            at: None,
            is_playing: false,
            window_choice: WINDOW,
            views: vec![View::of(What::Look)],
            columns: 80,
            rows: 24,
            is_stale: false,
            is_early: false,
            merged: RefCell::new(None),
        }
    }

    /// How large the screen is.
    pub fn resize(&mut self, columns: usize, rows: usize) {
        self.rows = rows;
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

    /// What is seen before all sources are attached: it is shown until the first moment comes.
    pub fn add_early(&mut self, header: Header, lines: Vec<Line>) {
        self.header = header;
        self.add(lines);
        self.is_early = true;
    }

    /// Whether anything was seen by all sources.
    pub fn has_begun(&self) -> bool {
        self.history.newest().is_some() && !self.is_early
    }

    /// Takes the next moment; [`State::settle`] shows it.
    pub fn add(&mut self, lines: Vec<Line>) {
        if std::mem::take(&mut self.is_early) && self.phase == Phase::Running {
            self.history.clear();
        }
        for line in &lines {
            if let (Line::Gap(gap), Mode::Live) = (line, &self.mode)
                && gap.reason == SLOW_SCREEN
            {
                self.missed = self.missed.saturating_add(gap.count);
            }
        }
        if let Err(error) = self.history.add(lines) {
            self.said = format!("cannot keep the snapshot: {error}");
        }
        self.is_stale = true;
    }

    /// Shows what has come.
    pub fn settle(&mut self) {
        if !std::mem::take(&mut self.is_stale) {
            return;
        }
        let oldest = self.history.forgotten();
        if self.at.is_some_and(|at| at < oldest) {
            self.at = Some(oldest);
            self.said = "the frozen snapshot is no longer kept: this is the oldest".to_owned();
        }
        // What is frozen stays as it is, but for what is gone.
        if self.at.is_none() || self.window.start < oldest {
            self.refresh();
        }
    }

    /// No more moments come.
    pub fn end(&mut self, problem: Option<String>) {
        self.phase = Phase::Ended;
        self.problem = problem.unwrap_or_default();
        self.settle();
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
        self.shown().next_back().map(|moment| moment.end_unix_ns)
    }

    /// The moments that are shown.
    pub fn shown(&self) -> impl DoubleEndedIterator<Item = &Moment> + ExactSizeIterator {
        self.history.within(&self.window)
    }

    /// What a source saw in what is shown.
    pub fn merged(&self, card: &Card) -> Option<Rc<Snapshot>> {
        let known = self.merged.borrow().clone();
        if let Some((_, _, snapshot)) = known.filter(|(name, window, _)| *name == card.name && *window == self.window) {
            return Some(snapshot);
        }
        let snapshot = Rc::new(self.history.merged(&self.window, card)?);
        *self.merged.borrow_mut() = Some((card.name, self.window.clone(), Rc::clone(&snapshot)));
        Some(snapshot)
    }

    /// Whether a look counts that late event.
    pub fn counts(&self, card: &Card, event: &LateEvent) -> bool {
        card.is_late(event, &self.cards())
    }

    /// The sources that measure.
    pub fn cards(&self) -> Vec<&'static Card> {
        self.header.sources.iter().filter_map(|of| named(&of.source)).collect()
    }

    /// The lines of what is shown, a moment each.
    pub fn shown_lines(&self) -> impl Iterator<Item = Vec<Line>> + '_ {
        self.shown().map(Moment::lines)
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
            Key::Char('w') if self.history.newest().is_none() => self.said = "nothing to save yet".to_owned(),
            Key::Char('w') => return Reaction::Write,
            Key::Char('?') if self.view().what != What::Help => self.open(What::Help),
            Key::Char('/') => self.typing = Some(self.view().filter.clone()),
            Key::Enter | Key::Right | Key::Char('l') => self.open_chosen(),
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
            Key::Char(' ') => self.freeze_or_go_on(),
            Key::Char('t') => self.step_by_hand(1),
            Key::Char('T') => self.step_by_hand(-1),
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
            Key::Char(character) if typed.len() < LONGEST_FILTER => typed.push(character),
            _ => {}
        }
        self.view_mut().filter.clone_from(&typed);
        self.typing = (key != Key::Esc).then_some(typed);
        self.show();
        Reaction::Nothing
    }

    /// Begins with one program; what all of the machine does is behind it.
    pub fn look_at(&mut self, whose: Whose) {
        self.open(What::Program(whose));
    }

    /// Shows a view, or goes back to it where it was opened before.
    fn open(&mut self, what: What) {
        let before = self.views.iter().position(|view| view.what == what);
        if before.is_none() && self.views.len() >= DEEPEST {
            self.said = "cannot open more views (press Esc to go back)".to_owned();
            return;
        }
        // It is made anew when it is on top again.
        self.view_mut().panels.clear();
        match before {
            Some(place) => self.views.truncate(place + 1),
            None => self.views.push(View::of(what)),
        }
        self.show();
        self.step(0);
    }

    fn open_chosen(&mut self) {
        let view = self.view();
        let Some(panel) = view.panels.get(view.focus()) else { return };
        let choice = view.choice(panel);
        match panel.rows().get(choice.place_in(panel)).and_then(|row| row.opens.clone()) {
            Some(what) => self.open(what),
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
        // Whoever comes here has seen which row is the first.
        self.step(0);
    }

    fn step(&mut self, by: isize) {
        // The first line of the screen and the last one are not of panels.
        let room = u16::try_from(self.rows.saturating_sub(2)).unwrap_or(u16::MAX);
        let view = self.view_mut();
        let focus = view.focus();
        let shown = heights(&view.panels, focus, room).get(focus).map_or(0, |height| usize::from(*height));
        view.choose(|panel, choice| {
            choice.step(panel, by);
            // A text is at its end where its last line is in sight, below its title.
            if matches!(panel.body, Body::Text(_)) {
                choice.place = choice.place.min(panel.len().saturating_sub(shown.saturating_sub(1)));
            }
        });
    }

    /// How far a page goes.
    fn page(&self) -> isize {
        (self.rows / 2).max(1) as isize
    }

    fn sort(&mut self, change: impl FnOnce(&Panel, &mut Choice)) {
        self.view_mut().choose(change);
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
            let end = if by > 0 { "this is the newest" } else { "this is the oldest one kept" };
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
        let mut gatherer = Gatherer::of(self.cards(), By::Name);
        let mut found: Vec<Found<'static>> = Vec::new();
        let mut lost: BTreeMap<String, u64> = BTreeMap::new();
        for moment in self.shown() {
            for (card, event) in &moment.late {
                gatherer.add_kept(card, event);
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
        for of in found.iter_mut().filter(|of| of.has_remark()) {
            if let Some(snapshot) = self.history.merged(&self.window, of.card) {
                of.remark_on(&snapshot);
            }
        }
        let mut unmeasured = self.header.unmeasured.clone();
        unmeasured.extend(Found::set_aside(&mut found, &self.header.sources));
        let look = gatherer.finish_with(&found, unmeasured);
        self.look = Look { lost, weaker: self.header.weaker.clone(), ..look };
        self.show();
    }

    /// Makes the panels of the view on top.
    fn show(&mut self) {
        let last = self.views.len() - 1;
        let panels = view::panels(self, &self.views[last].what, self.columns);
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
