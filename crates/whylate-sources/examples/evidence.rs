// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints what the causes of late events are told from, a JSON object a line: `evidence THRESHOLD_US SECONDS [SOURCE]`. For new golden
//! files.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use whylate_sources::{Options, SOURCES};

fn main() -> anyhow::Result<()> {
    let number = |index| std::env::args().nth(index).and_then(|text: String| text.parse::<u64>().ok());
    let options = Options {
        explain_over_ns: Some(number(1).unwrap_or(1_000) * 1_000),
        keep_evidence: true,
        phases: true,
        ..Options::default()
    };
    let name = std::env::args().nth(3).unwrap_or_else(|| "wq".to_owned());
    let source = SOURCES.iter().find(|source| source.info().name == name).context("no source has this name")?;
    let mut source = source.attach(&options)?;
    let end = Instant::now() + Duration::from_secs(number(2).unwrap_or(10));
    while Instant::now() < end {
        source.drain_late(Duration::from_millis(100), &mut |event| {
            println!("{}", serde_json::json!({ "evidence": event.evidence, "causes": event.causes }));
        })?;
    }
    eprintln!("{:?}", source.snapshot()?.lost);
    Ok(())
}
