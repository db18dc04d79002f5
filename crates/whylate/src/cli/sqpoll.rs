// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate sqpoll`: what io_uring submission threads spend their time on.

mod sweep;

use clap::{Args, Subcommand};
use whylate_model::sources::SQPOLL;
use whylate_sources::Threads;
use whylate_sources::sqpoll::SqpollOptions;

use crate::cli::arguments::{Explain, Rank, Record, Schedule, Verbosity, WAITS};
use crate::cli::runner::{Query, Stream, drive};
use crate::cli::values::pid;
use crate::cli::{FAILURE, Origin, SUCCESS, present};
use crate::render::text::fit::terminal_columns;
use crate::render::text::sqpoll::SqpollText;
use crate::store::late_buffer::Keep;

/// Advice on how to get a submission thread.
const HOW_TO: &str = "a ring that is set up with IORING_SETUP_SQPOLL has one, e.g. of `whylate inject sqpoll` or of fio's sqthread_poll=1";

/// Whether io_uring's submission threads work, spin, sleep or starve
///
/// A submission thread (IORING_SETUP_SQPOLL) that looks busy may only be spinning. whylate tells the two apart on any
/// kernel from 6.1 on, without taking a ring's lock.
#[derive(Debug, Args)]
#[command(mut_arg("why", |why| why.help(WAITS)), mut_arg("rank_by", |by| by.alias("by")))]
#[command(after_help = "\
examples:
    # a row per submission thread at Ctrl-C, and what to change
    whylate sqpoll
    # each second, ten times
    whylate sqpoll 1 10
    # the threads of one process
    whylate sqpoll -p 1234 1
    # what ran on the CPU while a thread waited for it for 1 ms or longer
    whylate sqpoll --why 1ms
    # how busy a thread is at different numbers of requests in flight
    whylate sqpoll sweep --filename /dev/nvme0n1")]
pub struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    /// Only threads of this process
    #[arg(short, long, value_parser = pid)]
    pid: Option<u32>,
    /// Trace the entry and exit of the functions that do work, instead of sampling. The kernel must allow BPF programs at
    /// functions; whylate starts and ends only after each submission thread of this host has slept once
    #[arg(long)]
    precise: bool,
    #[command(flatten)]
    explain: Explain,
    #[command(flatten)]
    rank: Rank,
    #[command(flatten)]
    pub(crate) schedule: Schedule,
    #[command(flatten)]
    verbosity: Verbosity,
    #[command(flatten)]
    record: Record,
    /// Where figures come from: bpf, fdinfo, or auto for the best that works
    #[arg(long, value_name = "BACKEND", default_value = "auto")]
    backend: String,
}

#[derive(Debug, Subcommand)]
enum What {
    Sweep(sweep::Arguments),
}

/// Measures or replays; prints at each interval, and at the end. Returns the exit status.
///
/// # Errors
/// Fails if the source cannot attach, or the output cannot be written.
pub fn run(arguments: &Arguments, origin: &Origin) -> anyhow::Result<u8> {
    if let Some(What::Sweep(arguments)) = &arguments.what {
        return sweep::run(arguments).map(|()| SUCCESS);
    }
    let thresholds = arguments.explain.with_limit_of(&SQPOLL).thresholds(None);
    arguments.rank.needs(thresholds)?;
    let options = SqpollOptions {
        backend: Some(arguments.backend.clone()),
        threads: Threads {
            process: if origin.is_live() { present(arguments.pid)? } else { arguments.pid },
            ..Threads::default()
        },
        precise: arguments.precise,
        explain_over_ns: thresholds.explain_ns,
        ..SqpollOptions::default()
    };
    let pid = arguments.pid.map(|pid| pid.to_string());
    let query = Query {
        source: &options,
        schedule: arguments.schedule,
        explain: arguments.explain,
        is_verbose: arguments.verbosity.verbose,
        keep: Keep::for_output(arguments.schedule.json, thresholds),
        late: thresholds.explain_ns.map(|_| thresholds),
        only: &|labels| pid.as_ref().is_none_or(|pid| labels.get("pid") == Some(pid)),
    };
    let stream = Stream::open(origin, &query, arguments.record.output.as_deref())?;
    if stream.feed().is_some_and(|feed| feed.source.sees_nothing().is_some()) {
        let owner = arguments.pid.map_or_else(|| "this host".to_owned(), |pid| format!("process {pid}"));
        say!("whylate: {owner} has no io_uring submission thread now: {HOW_TO}");
        // A thread may start during a longer run.
        if !arguments.schedule.lasts() {
            return Ok(if arguments.pid.is_some() { FAILURE } else { SUCCESS });
        }
    }
    let mut text = SqpollText::new(thresholds, terminal_columns()).by(arguments.rank.into());
    text.is_verbose = arguments.verbosity.verbose;
    let mut seen_any = false;
    let is_late = drive(stream, &query, &mut text, &mut |snapshot| seen_any |= !snapshot.series.is_empty())?;
    // The process has no submission thread; a message has said so.
    if arguments.pid.is_some() && !seen_any {
        return Ok(FAILURE);
    }
    Ok(arguments.explain.status(is_late))
}
