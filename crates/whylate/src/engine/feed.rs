// SPDX-License-Identifier: MIT OR Apache-2.0
//! An attached source with its card.

use std::time::Duration;

use whylate_model::Card;
use whylate_sources::{AttachError, Attached, Measuring, Session, Source};

use crate::errors::what_to_do;

/// An attached source.
pub struct Feed {
    pub card: &'static Card,
    pub source: Measuring,
}

impl Feed {
    /// Attaches one source on its own, and prints its limitations on this machine to standard error.
    ///
    /// # Errors
    /// When it cannot attach.
    pub fn attach(source: &dyn Source, is_verbose: bool) -> anyhow::Result<Self> {
        let card = source.info().card;
        let source = source.attach(&Session::of_one()).map_err(|error| match error {
            // The message is about what the user asked for.
            AttachError::Contradiction(_) => anyhow::Error::from(error),
            error => anyhow::Error::from(error).context(format!("cannot attach {}", card.name)),
        })?;
        print_limitations(card, &source, is_verbose);
        Ok(Feed { card, source })
    }

    /// Returns the number of notes on the source's precision on this machine that only `-v` prints.
    pub fn precision_notes(&self) -> u64 {
        precision_notes(self.card, &self.source).iter().filter(|note| !is_for_a_privilege(note)).count() as u64
    }

    /// Takes a snapshot and the late events that have arrived, and drops both.
    pub(super) fn discard(&mut self) -> anyhow::Result<()> {
        self.source.snapshot()?;
        self.source.drain_late(Duration::ZERO, &mut |_| ())
    }
}

/// Prints the limitations of an attached source on this machine to standard error: which CPUs are left out, what a missing
/// privilege costs, and, with `is_verbose`, how its precision is reduced otherwise.
pub fn print_limitations<A: Attached + ?Sized>(card: &Card, source: &Measuring<A>, is_verbose: bool) {
    let notes = precision_notes(card, source).into_iter().filter(|note| is_verbose || is_for_a_privilege(note));
    for note in notes.chain(source.attached.left_out().map(str::to_owned)) {
        say!("whylate: {note}");
    }
}

/// Returns whether a note says which privilege would mend it: then the user can do something about it.
fn is_for_a_privilege(note: &str) -> bool {
    note.contains("grant CAP_")
}

/// Returns how the precision of an attached source is reduced on this machine.
fn precision_notes<A: Attached + ?Sized>(card: &Card, source: &Measuring<A>) -> Vec<String> {
    let Measuring { backend, fallback_reason, attached } = source;
    let fallback = fallback_reason
        .as_ref()
        .map(|reason| format!("{} uses the {backend} backend: {reason}{}", card.name, what_to_do(reason)));
    let others = attached.limitations().into_iter().chain(attached.chosen());
    fallback.into_iter().chain(others.map(str::to_owned)).collect()
}
