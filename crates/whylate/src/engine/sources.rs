// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attaches all sources at once, for the overview, `top`, `record` and `report`.

use std::time::Instant;

use anyhow::Context as _;
use whylate_model::Card;
use whylate_model::recording::{Measured, Unmeasured};
use whylate_model::units::printable;
use whylate_sources::{CommonOptions, Session, Source, sources};

use crate::engine::feed::Feed;
use crate::engine::watch::{Ended, Watch};

/// The attached sources, the sources that could not attach, and limitations of the attached ones.
pub struct Sources {
    pub session: Session,
    pub looking: Vec<Feed>,
    pub unmeasured: Vec<Unmeasured>,
    pub limitations: Vec<Unmeasured>,
}

impl Sources {
    /// Attaches every source that can attach, and prints to standard error what is missing, after `cannot` and this verb.
    /// Returns `None` if interrupted.
    ///
    /// # Errors
    /// Fails if no source can attach.
    pub fn attach(watch: &Watch, wish: &Wish, verb: &str) -> anyhow::Result<Option<Self>> {
        let Some(sources) = attach(watch, wish, &mut |_| ())? else {
            say!("whylate: interrupted before anything was measured");
            return Ok(None);
        };
        for missing in &sources.unmeasured {
            say!("whylate: cannot {verb} {}: {}", missing.source, printable(&missing.reason));
        }
        if let Some(left_out) = sources.left_out() {
            say!("whylate: {}", printable(&left_out));
        }
        Ok(Some(sources))
    }

    /// Returns the CPUs left out by a source that measures with threads or timers of its own.
    pub fn left_out(&self) -> Option<String> {
        let attached = self.looking.iter().map(|feed| &feed.source.attached);
        attached.filter_map(|attached| attached.left_out()).next().map(str::to_owned)
    }
}

/// Sources to attach, and their reports.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Names of the sources to attach; empty for all.
    pub only: Vec<String>,
    /// Latency from which late events are explained; `None` for each source's own limit.
    pub why_ns: Option<u64>,
    /// Explains events of this latency or longer, even where the limit above is higher.
    pub surely_from_ns: Option<u64>,
    /// Splits series by as many labels as each source can.
    pub in_detail: bool,
    /// Measures at longer intervals and without user stacks, for a run without an end that reports no stacks.
    pub is_sparing: bool,
    /// CPUs for whylate's own threads and timers; empty for all usable ones.
    pub cpus: Vec<u32>,
    /// Share of the machine's CPU time for explaining late events, in parts per million; `None` for [`EXPLAIN_PPM`].
    pub explain_ppm: Option<u32>,
}

/// Default share of the machine's CPU time for explaining late events: 1 %.
const EXPLAIN_PPM: u32 = 10_000;

impl Wish {
    /// Returns whether a source is to be attached.
    pub fn takes(&self, card: &Card) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == card.name)
    }

    /// Returns the latency from which late events of this source are explained.
    pub fn late_from_ns(&self, card: &Card) -> u64 {
        self.at_most(self.why_ns.unwrap_or(card.events().late_from_ns))
    }

    fn at_most(&self, limit_ns: u64) -> u64 {
        self.surely_from_ns.map_or(limit_ns, |surely_ns| limit_ns.min(surely_ns))
    }
}

/// Progress of `attach`.
pub enum Attaching<'a> {
    /// This source is attached next.
    Begins(&'a Card),
    /// Sources attached so far. Late events have no causes before all sources are attached.
    Done(&'a mut [Feed]),
}

/// Attaches every source that can attach, and records why others cannot. Calls `on_progress` before and after each
/// source. Returns `None` if interrupted: on a busy machine, attaching may take long.
///
/// # Errors
/// Fails if no source can attach.
pub fn attach(
    watch: &Watch,
    wish: &Wish,
    on_progress: &mut dyn FnMut(Attaching<'_>),
) -> anyhow::Result<Option<Sources>> {
    attach_each(sources(), watch, wish, on_progress)
}

/// Attaches each of these sources that can attach, as [`attach`] does every source.
///
/// # Errors
/// Fails if no source can attach.
pub(super) fn attach_each(
    each: impl IntoIterator<Item = Box<dyn Source>>,
    watch: &Watch,
    wish: &Wish,
    on_progress: &mut dyn FnMut(Attaching<'_>),
) -> anyhow::Result<Option<Sources>> {
    let new_session = || {
        let session = Session::of_several_on(&wish.cpus);
        session.limit_explaining(wish.explain_ppm.unwrap_or(EXPLAIN_PPM));
        session
    };
    let (mut session, mut first) = (new_session(), None);
    if !wish.cpus.is_empty() {
        // A CPU that cannot be measured is an error of the command, not of each source.
        session.cpus(&[])?;
    }
    let (mut looking, mut unmeasured, mut limitations) = (Vec::new(), Vec::new(), Vec::<Unmeasured>::new());
    let mut wanted: Vec<_> = each.into_iter().filter(|source| wish.takes(source.info().card)).collect();
    for source in &mut wanted {
        let card = source.info().card;
        source.ask(CommonOptions {
            explain_over_ns: Some(wish.late_from_ns(card)),
            explain_held_up_over_ns: card
                .held_up
                .map(|judged| wish.at_most(wish.why_ns.unwrap_or(judged.late_from_ns))),
            in_detail: wish.in_detail,
            is_sparing: wish.is_sparing,
            ..CommonOptions::default()
        });
    }
    // Before any thread is started. Each source reports an error itself.
    let _ = session.cpus(&[]);
    wanted.iter().for_each(|source| source.prepare(&session));
    for source in wanted {
        if watch.until(Some(Instant::now()))? != Ended::Time {
            return Ok(None);
        }
        let card = source.info().card;
        on_progress(Attaching::Begins(card));
        let with_reason = |reason: String| Unmeasured::new(card.name, reason);
        match source.attach(&session) {
            Ok(source) => {
                // A limitation of the shared CPU account is reported once, not by each source.
                for reason in source.limitations().into_iter().chain(source.chosen()) {
                    if limitations.iter().all(|known| known.reason != reason) {
                        limitations.push(with_reason(reason.to_owned()));
                    }
                }
                // CPUs left out are reported for each source.
                let left_out = source.left_out().map(|reason| with_reason(reason.to_owned()));
                limitations.extend(left_out.map(|of| Unmeasured { leaves_cpus_out: true, ..of }));
                looking.push(Feed { card, source });
                on_progress(Attaching::Done(&mut looking));
            }
            Err(error) => {
                // The CPU account may rely on timers of a source that failed to attach: start with a new session.
                if looking.is_empty() {
                    let before = std::mem::replace(&mut session, new_session());
                    session.take_over(&before);
                }
                unmeasured.push(with_reason(error.to_string()));
                first.get_or_insert(error);
            }
        }
    }
    match first {
        Some(error) if looking.is_empty() => Err(anyhow::Error::from(error).context("cannot attach any source")),
        _ => {
            session.begin().context("cannot start CPU accounting")?;
            Ok(Some(Sources { session, looking, unmeasured, limitations }))
        }
    }
}

/// Describes a source for the header of a recording.
pub fn measured(feed: &Feed, wish: &Wish) -> Measured {
    Measured {
        source: feed.card.name.to_owned(),
        backend: feed.source.backend.to_owned(),
        late_from_ns: Some(wish.late_from_ns(feed.card)),
        nothing: feed.source.sees_nothing().map(str::to_owned),
    }
}
