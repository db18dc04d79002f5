// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints the figures of a measurement, live or from a recording.

use std::io::Write;

use jiff::tz::TimeZone;
use whylate_model::culprits::By;
use whylate_model::sources::TIMERLAT;
use whylate_model::{Culprits, LateEvent, Snapshot, TopN};
use whylate_sources::timerlat::Stop;

use super::screen::Screen;
use super::{Plan, View};
use crate::cli::{LATE, SUCCESS};
use crate::render::json::JsonLines;
use crate::render::text::timerlat::hist::{self, HistogramOptions};
use crate::render::text::timerlat::total::{THREAD, Total};
use crate::render::text::timerlat::{late, percentiles, top, verdict};
use crate::render::text::{Output as _, footer, why};
use crate::store::late_buffer::{Keep, LateBuffer};

/// Sums and worst activations since the start, and what the next output has.
pub struct Figures<'a> {
    plan: &'a Plan<'a>,
    pub screen: Screen,
    zone: TimeZone,
    pub total: Total,
    pub worst: TopN,
    /// Culprits of the explained activations, if they are ranked.
    culprits: Option<Culprits>,
    /// Late activations for the next line of JSON.
    pending: LateBuffer,
    /// Snapshot that was not printed yet.
    latest: Option<Snapshot>,
    /// Whether the return to user space is measured.
    pub has_user: bool,
}

impl<'a> Figures<'a> {
    pub fn new(plan: &'a Plan<'a>) -> Self {
        let worst = plan.common.worst.map(usize::from);
        Figures {
            plan,
            screen: Screen::new(),
            zone: TimeZone::system(),
            total: Total::default(),
            worst: TopN::new(worst.unwrap_or(0)),
            culprits: plan.common.why.map(|_| Culprits::by(plan.common.rank_by.map_or(By::Name, By::from))),
            pending: LateBuffer::new(Keep::worst(worst.filter(|_| plan.common.why.is_none()))),
            latest: None,
            has_user: false,
        }
    }

    /// Returns the exit status, if no threshold was hit.
    pub fn status(&self) -> u8 {
        let common = self.plan.common;
        let late_from_ns = common.why.unwrap_or(TIMERLAT.judged.late_from_ns);
        let is_late = self.total.all().latencies[THREAD].max_ns() >= late_from_ns;
        if common.fail_if_late && is_late { LATE } else { SUCCESS }
    }

    /// Writes the heading of late activations, if they are printed.
    pub fn begin(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.plan.common.why.is_some() && !self.plan.common.json {
            late::write_heading(out)?;
            out.flush()?;
        }
        Ok(())
    }

    /// Adds a snapshot.
    pub fn add(&mut self, snapshot: Snapshot) {
        self.total.add(&snapshot);
        self.latest = Some(snapshot);
    }

    /// Prints a late activation if it exceeds `--why`, and adds it to the worst, or to the next line of JSON.
    pub fn late(&mut self, out: &mut dyn Write, mut event: LateEvent) -> anyhow::Result<()> {
        let common = self.plan.common;
        let is_asked = common.why.is_some_and(|over_ns| event.latency_ns >= over_ns);
        if common.json {
            let evidence = event.evidence.take();
            if is_asked || common.worst.is_some() || (evidence.is_some() && common.why.is_none()) {
                self.pending.add(event);
            }
            return Ok(());
        }
        if is_asked {
            late::write(out, &event, &self.zone)?;
            self.culprits.iter_mut().for_each(|culprits| culprits.add(&TIMERLAT, &event));
        }
        self.worst.add(event);
        Ok(())
    }

    /// Prints the figures since the start, or the latest snapshot as JSON.
    pub fn refresh(&mut self, out: &mut dyn Write) -> anyhow::Result<()> {
        if !self.plan.common.json {
            let text = self.text()?;
            self.screen.show(out, &text)?;
        } else if let Some(mut latest) = self.latest.take() {
            self.pending.move_into(&mut latest);
            JsonLines.snapshot(out, latest)?;
        }
        Ok(out.flush()?)
    }

    /// Renders the figures since the start.
    fn text(&self) -> anyhow::Result<String> {
        let mut text = Vec::new();
        let (unit, has_user) = (self.plan.common.unit(), self.has_user);
        match &self.plan.view {
            View::Top { .. } => top::write(&mut text, &self.total, unit, has_user)?,
            View::Hist { shown, .. } => {
                let [irq, thread, user] = shown.kinds;
                hist::write(
                    &mut text,
                    &self.total,
                    &HistogramOptions { kinds: [irq, thread, user && has_user], ..*shown },
                )?;
            }
            View::Analysis => {}
        }
        if self.plan.common.percentiles {
            percentiles::write(&mut text, &self.total, unit, has_user)?;
        }
        if self.plan.common.worst.is_some() {
            writeln!(text, "The worst:")?;
            late::write_heading(&mut text)?;
            for event in self.worst.iter() {
                late::write(&mut text, event, &self.zone)?;
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn write_footer(&self, out: &mut dyn Write, latest: Snapshot) -> anyhow::Result<()> {
        let only = matches!(&self.plan.view, View::Hist { shown, .. } if shown.without_summary);
        if !only {
            percentiles::write_missed(out, &self.total)?;
        }
        let (lost, duration_ns, probe) = (self.total.lost.clone(), self.total.duration_ns, self.total.probe);
        let all = Snapshot { lost, duration_ns, probe, series: Vec::new(), ..latest };
        Ok(footer::write(out, &all, self.plan.common.verbosity.verbose)?)
    }

    /// Writes whether a threshold that stops the measurement, or without one `--why`, was reached, `hit` being a CPU on which
    /// one was, below everything else. rtla's own line says so for its analysis alone.
    pub fn write_verdict(&self, out: &mut dyn Write, hit: Option<u32>) -> anyhow::Result<()> {
        let plan = self.plan;
        let is_bare = match &plan.view {
            View::Top { .. } => false,
            View::Hist { shown, .. } => shown.without_summary,
            View::Analysis => true,
        };
        if !plan.common.json && !is_bare {
            let Stop { irq_ns, thread_ns } = plan.stop;
            // `--why` explains the latencies of the thread alone, until it runs.
            let limits = match (irq_ns, thread_ns) {
                (None, None) => [None, plan.common.why, None],
                _ => [irq_ns, thread_ns, thread_ns],
            };
            verdict::write(out, &self.total, limits, hit)?;
        }
        Ok(())
    }

    /// Returns whether the figures are refreshed: reading them costs more than measuring.
    pub fn refreshes(&self) -> bool {
        let common = self.plan.common;
        match self.plan.view {
            View::Top { is_live: true } => common.json || common.why.is_none(),
            View::Hist { is_live: true, .. } => !common.json && common.why.is_none(),
            _ => false,
        }
    }

    /// Prints the final figures. Everything but the sums is from the latest snapshot.
    pub fn finish(&mut self, out: &mut dyn Write, hit: bool) -> anyhow::Result<()> {
        let common = self.plan.common;
        let Some(mut latest) = self.latest.take() else { return Ok(()) };
        self.pending.move_into(&mut latest);
        if common.json {
            let is_live = matches!(self.plan.view, View::Top { is_live: true });
            let late = latest.late.clone();
            let snapshot = if is_live { latest } else { std::mem::take(&mut self.total).into_snapshot(latest) };
            JsonLines.snapshot(out, Snapshot { late, ..snapshot })?;
            return Ok(());
        }
        let text = self.text()?;
        self.screen.leave(out)?;
        out.write_all(text.as_bytes())?;
        if let Some(ranking) = self.culprits.as_mut().map(Culprits::take).filter(|ranking| !ranking.is_empty()) {
            writeln!(out)?;
            why::write_ranking(out, &ranking, TIMERLAT.words)?;
        }
        match (&self.plan.view, hit) {
            (View::Analysis, false) => {
                let max_ns = self.total.all().latencies.iter().take(2).map(|latencies| latencies.max_ns()).max();
                writeln!(out, "  Max latency was {}", max_ns.unwrap_or(0) / common.unit().ns())?;
            }
            (View::Analysis, true) => {}
            _ => self.write_footer(out, latest)?,
        }
        Ok(())
    }
}
