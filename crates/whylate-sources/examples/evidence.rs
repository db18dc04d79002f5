// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints the evidence for the causes of late events, a JSON object a line: `evidence THRESHOLD_US SECONDS [SOURCE]`.
//! For new golden files.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use whylate_model::sources::WQ;
use whylate_sources::{CommonOptions, Session, sources};

fn main() -> anyhow::Result<()> {
    let number = |index| std::env::args().nth(index).and_then(|text: String| text.parse::<u64>().ok());
    let name = std::env::args().nth(3).unwrap_or_else(|| WQ.name.to_owned());
    let found = sources().into_iter().find(|source| source.info().card.name == name);
    let mut source = found.context("no source has this name")?;
    let over_ns = number(1).unwrap_or(1_000) * 1_000;
    source.ask(CommonOptions { explain_over_ns: Some(over_ns), keep_evidence: true, ..CommonOptions::default() });
    let mut source = source.attach(&Session::of_one())?;
    let end = Instant::now() + Duration::from_secs(number(2).unwrap_or(10));
    while Instant::now() < end {
        source.drain_late(Duration::from_millis(100), &mut |event| {
            println!("{}", serde_json::json!({ "evidence": event.evidence, "causes": event.causes }));
        })?;
    }
    eprintln!("{:?}", source.snapshot()?.lost);
    Ok(())
}
