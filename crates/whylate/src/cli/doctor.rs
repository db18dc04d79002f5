// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate doctor`: shows what this kernel supports, and what whylate costs on this machine.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use whylate_sources::own_cost::{CostMeter, OwnCost};

use crate::cli::values::duration_ns;
use crate::engine::live::{Live, NOW_AND_THEN, Pace};
use crate::engine::sources::{Sources, Wish};
use crate::engine::ticks::{Sink, Tick, drive};
use crate::engine::watch::Watch;
use crate::json::write_line;
use crate::render::text::fit::terminal_columns;
use crate::render::text::{doctor, doctor_json, own_cost};

/// Show what this kernel can do, source by source, and what would enable more
///
/// It changes nothing and needs no privileges. What it cannot find out is shown as unknown, with the reason. With
/// --cost, it measures as the overview does, which needs root.
#[derive(Debug, Args)]
#[command(after_help = "\
examples:
    # what each source uses here, and what would make it better
    whylate doctor
    # the same, for a bug report
    whylate doctor --json
    # what whylate itself costs on this machine
    whylate doctor --cost")]
pub struct Arguments {
    /// Show the CPU time that whylate itself takes, by kernel event, while all sources measure for DURATION [default:
    /// 5s]
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = duration_ns,
        num_args = 0..=1,
        default_missing_value = "5s"
    )]
    cost: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    if let Some(duration_ns) = arguments.cost {
        let Some(cost) = cost(duration_ns)? else { return Ok(()) };
        match arguments.json {
            true => write_line(&mut out, &own_cost::object(&cost))?,
            false => own_cost::write(&cost, terminal_columns(), &mut out)?,
        }
        out.flush()?;
        return Ok(());
    }
    let found = whylate_sources::probe();
    if arguments.json {
        doctor_json::write(&found, &mut out)?;
    } else {
        doctor::write(&found, terminal_columns(), &mut out)?;
    }
    out.flush()?;
    Ok(())
}

/// Measures with all sources, and counts the cost. Returns `None` if interrupted.
fn cost(duration_ns: u64) -> anyhow::Result<Option<OwnCost>> {
    let watch = Watch::new().context("cannot watch for Ctrl-C")?;
    let wish = Wish::default();
    let Some(sources) = Sources::attach(&watch, &wish, "measure")? else { return Ok(None) };
    let pace = Pace { duration: Some(Duration::from_nanos(duration_ns)), poll: Some(NOW_AND_THEN), ..Pace::default() };
    let (mut live, _) = Live::begin(sources, &wish, watch, pace)?;
    let meter = CostMeter::begin()?;
    drive(&mut live, &mut Ignore)?;
    let cost = meter.end()?;
    live.finish()?;
    Ok(Some(cost))
}

/// Sink that drops all ticks.
struct Ignore;

impl Sink for Ignore {
    fn tick(&mut self, tick: Tick) -> anyhow::Result<ControlFlow<()>> {
        tick.report_problems();
        Ok(ControlFlow::Continue(()))
    }
}
