// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate run`: runs a command, and explains its elapsed time by its critical path.

mod user;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::gettid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use whylate_model::path::Query;
use whylate_model::path::command::{CommandReport, Explained, explain};
use whylate_model::path::members::{Marked, Members};
use whylate_model::path::watched::Watched;
use whylate_sources::AttachError;
use whylate_sources::kernel::clock;
use whylate_sources::kernel::credentials::run_as_real_user;
use whylate_sources::offcpu::cpu_samples::{CpuSampler, SampledThreads};
use whylate_sources::paths::{Recorded, Recorder};

use crate::cli::SUCCESS;
use crate::cli::arguments::Verbosity;
use crate::cli::import::{self, switches};
use crate::cli::program::thread_records;
use crate::engine::progress::Progress;
use crate::files;
use crate::json::write_line;
use crate::render::extension::report_written;
use crate::render::text::fit::Fit;
use crate::render::text::run as text;
use user::User;

/// Poll interval of the recorder.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Exit statuses of shells for a command that is not found, and for one that cannot be executed.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

/// Run a command and show why it took so long: what its critical path consists of
#[derive(Debug, Args)]
#[command(
    mut_arg("verbose", |verbose| verbose.help("Print all rows, the five longest waits, and lost events by reason")),
    after_help = "\
examples:
    # what the build waited for
    whylate run -- make -j4
    # also the path as a flame graph
    whylate run -o build.svg -- make
    # also a tree of the processes on the path
    whylate run --tree -- ./test.sh
    # run it as yourself
    sudo whylate run --user \"$USER\" -- make

The command runs as the user who runs whylate: under sudo as root, unless --user names another.
It gets none of the capabilities that whylate was given.
The report goes to standard error, as with time(1), and the exit status is the command's.
`whylate import` explains what trace-cmd, perf or ftrace has recorded."
)]
pub struct Arguments {
    /// Also write the path to a file; its extension sets the format: .svg, .folded or .trace.json (Perfetto)
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object in place of the text
    #[arg(long)]
    json: bool,
    /// Also print the processes on the path as a tree: how long each worked and waited
    #[arg(long)]
    tree: bool,
    #[command(flatten)]
    verbosity: Verbosity,
    /// Former name of `whylate import`
    #[arg(long, value_name = "FILE", hide = true, conflicts_with_all = ["output", "tree", "command"])]
    import: Option<PathBuf>,
    /// With --import: the thread with this TID
    #[arg(long, hide = true, requires = "import", conflicts_with_all = ["comm", "command"])]
    pid: Option<u32>,
    /// With --import: the thread with this name
    #[arg(long, hide = true, requires = "import", value_name = "NAME", conflicts_with = "command")]
    comm: Option<String>,
    /// Run the command as this user (a name or number): with the user's groups, and HOME, USER and LOGNAME set
    #[arg(long, value_name = "NAME", conflicts_with = "import")]
    user: Option<String>,
    /// The command and its arguments
    #[arg(
        trailing_var_arg = true,
        required_unless_present_any = ["import", "help_lost"],
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
}

impl Arguments {
    /// Returns the options that would show more.
    fn more(&self) -> Vec<&'static str> {
        let options = [("--tree", self.tree), ("-o FILE.svg", self.output.is_some()), ("-v", self.verbosity.verbose)];
        options.into_iter().filter(|(_, is_given)| !is_given).map(|(option, _)| option).collect()
    }
}

/// Exit status and run time (CLOCK_MONOTONIC) of the command; `tid` is the thread that spawned it.
struct Ended {
    tid: u32,
    status: ExitStatus,
    from_ns: u64,
    to_ns: u64,
}

/// Runs the command, and returns its exit status.
///
/// # Errors
/// Fails if recording fails, or the report cannot be written.
pub fn run(arguments: &Arguments) -> anyhow::Result<u8> {
    if let Some(file) = &arguments.import {
        let wanted = switches::wanted(arguments.pid, arguments.comm.as_deref());
        let printed = switches::PrintOptions { json: arguments.json, is_verbose: arguments.verbosity.verbose };
        import::read(file, |input| switches::print(input, wanted, printed, None))?;
        return Ok(SUCCESS);
    }
    let form = match &arguments.output {
        Some(path) => Some((path, text::form_of(path)?)),
        None => None,
    };
    let (name, rest) = arguments.command.split_first().context("name a command to run")?;
    if let Some((path, _)) = form {
        // Fails before the command runs if the file cannot be created.
        files::try_to_create(path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let user = arguments.user.as_deref().map(User::find).transpose()?;
    let signals = Signals::take()?;
    // Loads its programs while the recorder does.
    let sampler = CpuSampler::begin(SampledThreads::OfOwnChildren);
    let mut recorder = Recorder::start().context("cannot record what the CPUs do")?;
    let sampler = sampler.and_then(|sampler| sampler.wait());
    // JSON is alone on standard error.
    if let Some(limitation) = recorder.limitation().filter(|_| arguments.verbosity.verbose && !arguments.json) {
        say!("whylate: {limitation}");
    }
    let mut command = Command::new(name);
    command.args(rest);
    match &user {
        Some(user) => user.runs(&mut command),
        None => run_as_real_user(&mut command),
    }
    signals.is_alone.store(false, Ordering::Relaxed);
    let ended = run_and_poll(command, &signals, &mut || recorder.take_in());
    signals.is_alone.store(true, Ordering::Relaxed);
    let ended = match ended? {
        Ok(ended) => ended,
        Err(error) => {
            let as_user = user.map(|user| format!(" as {}", user.name)).unwrap_or_default();
            say!("whylate: cannot run {}{as_user}: {error}", name.to_string_lossy());
            return Ok(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE });
        }
    };
    let status = ended.status.code().or_else(|| ended.status.signal().map(|signal| 128 + signal));
    let ExplainedCommand { explained, lost, members, limitations } =
        explained(recorder.finish(ended.to_ns), sampler, &ended)?;
    let mut out = Fit::stderr(!arguments.json);
    if arguments.json {
        let (command, explained) = (name.to_string_lossy().into_owned(), explained.clone());
        write_line(&mut out, &CommandReport { command, explained, lost, limitations, ..CommandReport::default() })?;
    } else {
        // The command may have written anything above.
        writeln!(out)?;
        let shown = text::RunScreen {
            status: Some(ended.status),
            lost: &lost,
            members: Some(&members),
            has_tree: arguments.tree,
            is_verbose: arguments.verbosity.verbose,
            more: arguments.more(),
        };
        text::write(&mut out, &name.to_string_lossy(), &explained, &shown)?;
        for limitation in limitations.iter().flatten() {
            writeln!(out, "{limitation}")?;
        }
    }
    out.flush()?;
    if let Some((path, form)) = form {
        let cannot = || format!("cannot write {}", path.display());
        files::write(path, |out| text::write_file(out, form, &explained)).with_context(cannot)?;
        // JSON is alone on standard error.
        if !arguments.json {
            report_written(path);
        }
    }
    Ok(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(1))
}

/// Signals that also reach the command, or are forwarded to it, while whylate waits for its end. Before the command
/// starts and after its end, they have their default effect on whylate.
struct Signals {
    /// Signals to forward; each flag is set on delivery, and cleared when forwarded.
    to_forward: Vec<(Signal, Arc<AtomicBool>)>,
    /// Whether no command is running.
    is_alone: Arc<AtomicBool>,
}

impl Signals {
    /// Installs the handlers. Signals that the parent ignores, as nohup(1) does, stay ignored, for the command too.
    fn take() -> io::Result<Self> {
        let ignored = ignored()?;
        let (is_alone, mut to_forward) = (Arc::new(AtomicBool::new(true)), Vec::new());
        // The terminal sends the first two to the command as well.
        let signals = [(SIGINT, None), (SIGQUIT, None), (SIGTERM, Some(Signal::TERM)), (SIGHUP, Some(Signal::HUP))];
        for (number, forwarded) in signals.into_iter().filter(|(number, _)| ignored & 1 << (number - 1) == 0) {
            signal_hook::flag::register_conditional_default(number, Arc::clone(&is_alone))?;
            let seen = Arc::default();
            signal_hook::flag::register(number, Arc::clone(&seen))?;
            to_forward.extend(forwarded.map(|signal| (signal, seen)));
        }
        Ok(Signals { to_forward, is_alone })
    }

    fn forward(&self, pid: Option<Pid>) {
        for (signal, seen) in &self.to_forward {
            if let Some(pid) = pid
                && seen.swap(false, Ordering::Relaxed)
            {
                // The process may have ended.
                let _ = kill_process(pid, *signal);
            }
        }
    }
}

/// Returns the mask of ignored signals, bit n-1 for signal n (SigIgn in proc_pid_status(5)).
fn ignored() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    Ok(mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0))
}

/// Runs a command on a thread of its own, and polls until its end.
fn run_and_poll(mut command: Command, signals: &Signals, poll: &mut dyn FnMut()) -> anyhow::Result<io::Result<Ended>> {
    let (started, starts) = mpsc::channel::<u32>();
    let (done, ends) = mpsc::channel();
    let waiter = thread::Builder::new().name("whylate-run".to_owned()).spawn(move || {
        let tid = gettid().as_raw_pid() as u32;
        let from_ns = clock::monotonic_ns();
        let status = command.spawn().and_then(|mut child: Child| {
            // The receiver may be dropped.
            let _ = started.send(child.id());
            child.wait()
        });
        let to_ns = clock::monotonic_ns();
        let _ = done.send(status.map(|status| Ended { tid, status, from_ns, to_ns }));
    });
    let waiter = waiter.context("cannot start a thread")?;
    let mut pid = None;
    let ended = loop {
        match ends.recv_timeout(POLL_INTERVAL) {
            Ok(ended) => break ended,
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the thread that runs the command has ended"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        pid = pid.or_else(|| starts.try_recv().ok().and_then(|pid| Pid::from_raw(pid as i32)));
        signals.forward(pid);
        poll();
    };
    let _ = waiter.join();
    Ok(ended)
}

/// An explained command, with its threads and what was lost.
struct ExplainedCommand {
    explained: Explained,
    lost: BTreeMap<String, u64>,
    members: Members,
    /// What is not known here, and why.
    limitations: Option<Vec<String>>,
}

fn explained(
    recorded: Recorded,
    sampler: Result<CpuSampler, AttachError>,
    ended: &Ended,
) -> anyhow::Result<ExplainedCommand> {
    let Recorded { past, births, mut lost, mut names, reclaim, .. } = recorded;
    let samples = sampler.map_err(anyhow::Error::from).and_then(|sampler| sampler.finish(names.symbols(), &mut lost));
    let (records, limitations) = thread_records(reclaim, samples);
    let members = births.descendants_of(ended.tid);
    let Ended { tid, from_ns, to_ns, .. } = *ended;
    let asked = Query { tid, from_ns, to_ns, is_wait: false, is_command: true };
    let progress = Progress::new("The command has ended");
    // A signal terminates whylate by now.
    let mut goes_on = || true;
    let mut back = progress.back(from_ns, to_ns, &mut goes_on);
    let mut past = Watched::new(past, &mut back);
    let explained = explain(&mut Marked { past: &mut past, members: &members }, asked, &(), &mut names, &records);
    if let Some(error) = past.past.past.take_error() {
        return Err(error).context("cannot read what was kept in a temporary file");
    }
    lost.retain(|_, count| *count > 0);
    Ok(ExplainedCommand { explained, lost, members, limitations: (!limitations.is_empty()).then_some(limitations) })
}
