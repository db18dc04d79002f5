// SPDX-License-Identifier: MIT OR Apache-2.0
//! An attached source with its card.

use std::time::Duration;

use anyhow::Context as _;
use whylate_model::Card;
use whylate_sources::{Attached, Measuring, Session, Source};

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
    pub fn attach(source: &dyn Source) -> anyhow::Result<Self> {
        let card = source.info().card;
        let source = source.attach(&Session::of_one()).with_context(|| format!("cannot attach {}", card.name))?;
        print_limitations(card, &source);
        Ok(Feed { card, source })
    }

    /// Takes a snapshot and the late events that have arrived, and drops both.
    pub(super) fn discard(&mut self) -> anyhow::Result<()> {
        self.source.snapshot()?;
        self.source.drain_late(Duration::ZERO, &mut |_| ())
    }
}

/// Prints the limitations of an attached source on this machine to standard error.
pub fn print_limitations<A: Attached + ?Sized>(card: &Card, source: &Measuring<A>) {
    let Measuring { backend, fallback_reason, attached } = source;
    if let Some(reason) = fallback_reason {
        say!("whylate: {} uses the {backend} backend: {reason}{}", card.name, what_to_do(reason));
    }
    for note in attached.limitations().into_iter().chain(attached.left_out()).chain(attached.chosen()) {
        say!("whylate: {note}");
    }
}
