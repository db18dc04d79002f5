// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of watching I/O requests with whylate, and with biolatency and biosnoop, on the same fio load.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;

use crate::child::{Tool, wait_until};
use crate::figures::{self, Check, Spread, median_of};
use crate::programs::{self, Counts};
use crate::{floor, kernel, machine, results, whylate};

/// Limit of BPF run time per request with all phases, less the time of counting.
const LIMIT_NS: f64 = 400.0;
/// Limit of the cost relative to biolatency and biosnoop together.
const RATIO_LIMIT: f64 = 0.7;
/// Limit of the loss of requests per second.
const SLOWDOWN_LIMIT_PERCENT: f64 = 2.0;
const DEPTH: u32 = 128;
const SECONDS: u32 = 4;
const FILE_MIB: u32 = 256;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: results::Arguments,
    /// libbpf-tools' biolatency.
    #[arg(long, value_name = "PROGRAM", default_value = "biolatency")]
    biolatency: PathBuf,
    /// libbpf-tools' biosnoop; left out where it does not run.
    #[arg(long, value_name = "PROGRAM", default_value = "biosnoop")]
    biosnoop: PathBuf,
}

const ALONE: usize = 0;
const WHYLATE: usize = 1;
const BIOLATENCY: usize = 2;
const BIOSNOOP: usize = 3;
const BLKTRACE: usize = 4;
const WITHOUT_PHASES: usize = 5;

const NAMES: [&str; 6] =
    ["nothing", "`whylate block --table`", "`biolatency`", "`biosnoop`", "`blktrace`", "`whylate block`"];

/// Subjects that are left out if they do not run.
const OPTIONAL: [usize; 2] = [BIOSNOOP, BLKTRACE];

/// A measurement of one subject in one round.
#[derive(Clone, Debug, Default)]
struct Sample {
    requests_per_second: f64,
    /// Run time of all BPF programs per request.
    bpf_ns: f64,
    /// `bpf_ns` less the time of counting: the mean run time of an empty program beside them, for each run.
    own_ns: f64,
    programs: Vec<Counts>,
    requests: f64,
    /// Events that the tool reports as lost.
    lost: f64,
}

/// A file that is written once, removed on drop.
struct Load(tempfile::NamedTempFile);

impl Load {
    fn make() -> Result<Load> {
        let load = Load(tempfile::NamedTempFile::new_in(".").context("cannot make a file here")?);
        load.fio(&["--rw=write", "--bs=1m"])?;
        Ok(load)
    }

    fn fio(&self, options: &[&str]) -> Result<serde_json::Value> {
        let output = Command::new("fio")
            .arg("--name=load")
            .arg(format!("--filename={}", self.0.path().display()))
            .args([&format!("--size={FILE_MIB}m"), "--direct=1", "--output-format=json"])
            .args(options)
            .output()
            .context("cannot run fio")?;
        ensure!(output.status.success(), "fio failed: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).context("fio tells nothing")
    }

    /// Returns fio's requests per second, and their total number.
    fn read(&self) -> Result<(f64, f64)> {
        let (depth, seconds) = (format!("--iodepth={DEPTH}"), format!("--runtime={SECONDS}"));
        let options = ["--rw=randread", "--bs=4k", "--ioengine=libaio", "--time_based", &depth, &seconds];
        let report = self.fio(&options)?;
        let read = &report["jobs"][0]["read"];
        let figure = |name: &str| read[name].as_f64().with_context(|| format!("fio does not tell {name}"));
        Ok((figure("iops")?, figure("total_ios")?))
    }
}

/// The block device that a file lies on.
struct Device {
    /// Directory in `/sys`.
    directory: PathBuf,
    node: String,
}

impl Device {
    fn for_file(file: &Path) -> Result<Device> {
        let number = fs::metadata(file)?.dev();
        let directory = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number)));
        let facts = fs::read_to_string(directory.join("uevent")).context("the file lies on no block device")?;
        let name = facts.lines().find_map(|line| line.strip_prefix("DEVNAME=")).context("its device has no name")?;
        Ok(Device { node: format!("/dev/{name}"), directory })
    }

    fn is_traced(&self) -> bool {
        fs::read_to_string(self.directory.join("trace/enable")).is_ok_and(|text| text.trim() == "1")
    }
}

struct Bench<'a> {
    arguments: &'a Arguments,
    whylate: PathBuf,
    load: Load,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let biolatency = arguments.biolatency.to_string_lossy();
    if machine::is_skipped(&[("fio", "no fio to make requests"), (&biolatency, "no biolatency to compare with")]) {
        return Ok(true);
    }
    let bench = Bench { arguments, whylate: whylate::build("bench-block")?, load: Load::make()? };
    let mut subjects: Vec<usize> = (0..NAMES.len()).collect();
    let (mut refused, mut rounds) = (String::new(), Vec::new());
    for subject in OPTIONAL {
        if let Err(error) = bench.try_out(subject) {
            let why = format!("{error:#}").replace('\n', "; ");
            refused += &format!("- {} does not run here, and is left out: {why}\n", NAMES[subject]);
            subjects.retain(|&other| other != subject);
        }
    }
    for round in 0..=arguments.results.rounds as usize {
        eprintln!("round {round} of {}{}", arguments.results.rounds, if round == 0 { " (not timed)" } else { "" });
        let mut samples = vec![Sample::default(); NAMES.len()];
        for turn in 0..subjects.len() {
            let which = subjects[(round + turn) % subjects.len()];
            samples[which] = bench.sample(which).with_context(|| format!("cannot measure {}", NAMES[which]))?;
        }
        if round > 0 {
            rounds.push(samples);
        }
    }
    let checks = checks(&rounds, &subjects);
    let mut command = format!("block --rounds {}", arguments.results.rounds);
    for (option, program) in [("biolatency", &arguments.biolatency), ("biosnoop", &arguments.biosnoop)] {
        if program != Path::new(option) {
            command += &format!(" --{option} PROGRAM");
        }
    }
    let heading = results::heading("`whylate block`", "bench-block", &command);
    arguments.results.publish("block", &markdown(&rounds, &subjects, &checks, &format!("{heading}{refused}")))?;
    Ok(checks.iter().all(Check::is_within))
}

impl Bench<'_> {
    fn start(&self, subject: usize) -> Result<Option<Tool>> {
        let (program, options): (&Path, &[&str]) = match subject {
            ALONE => return Ok(None),
            WHYLATE => (&self.whylate, &["block", "--table"]),
            WITHOUT_PHASES => (&self.whylate, &["block"]),
            BIOLATENCY => (&self.arguments.biolatency, &[]),
            BIOSNOOP => (&self.arguments.biosnoop, &[]),
            BLKTRACE => return self.start_blktrace().map(Some),
            other => return Err(anyhow!("no subject {other}")),
        };
        let mut tool = Tool::start(program, options)?;
        wait_until("it does not attach", || {
            tool.expect_running()?;
            Ok(!programs::of_process(tool.pid())?.is_empty())
        })?;
        Ok(Some(tool))
    }

    fn start_blktrace(&self) -> Result<Tool> {
        let device = Device::for_file(self.load.0.path())?;
        let mut tool = Tool::start("blktrace", &["-d", &device.node, "-o", "-"])?;
        wait_until("it does not trace", || {
            tool.expect_running()?;
            Ok(device.is_traced())
        })?;
        Ok(tool)
    }

    /// Tries it under load, as a tool that has loaded its programs may still fail to attach them.
    fn try_out(&self, subject: usize) -> Result<()> {
        if let Some(tool) = self.start(subject)? {
            self.load.read()?;
            tool.end()?;
        }
        Ok(())
    }

    /// Measures requests per second without the kernel's counting of BPF run time, which costs more than some programs.
    fn sample(&self, subject: usize) -> Result<Sample> {
        let tool = self.start(subject)?;
        let (requests_per_second, requests) = self.load.read()?;
        let mut sample = Sample { requests_per_second, requests, ..Sample::default() };
        let Some(tool) = tool else { return Ok(sample) };
        if subject != BLKTRACE {
            let empty = floor::attach_to_switches().context("cannot attach the empty program")?;
            let counting = kernel::count_run_times()?;
            let count = || anyhow::Ok((programs::of_process(tool.pid())?, programs::of_process(std::process::id())?));
            let before = count()?;
            let (_, requests) = self.load.read()?;
            let after = count()?;
            drop((counting, empty));
            let floor = programs::difference(&before.1, &after.1);
            let floor_ns = floor.iter().find(|program| program.runs > 0).map_or(0.0, Counts::mean_ns);
            sample.programs = programs::difference(&before.0, &after.0);
            let each = |ns: &dyn Fn(&Counts) -> f64| sample.programs.iter().map(ns).sum::<f64>() / requests.max(1.0);
            sample.bpf_ns = each(&|program| program.run_ns as f64);
            sample.own_ns = sample.bpf_ns - each(&|program| program.runs as f64 * floor_ns);
            sample.requests += requests;
        }
        sample.lost = lost_events(&tool.end()?);
        Ok(sample)
    }
}

/// Sums biosnoop's messages about lost events.
fn lost_events(said: &str) -> f64 {
    let counts = said.lines().filter_map(|line| line.strip_prefix("lost ")?.split(' ').next()?.parse::<u64>().ok());
    counts.sum::<u64>() as f64
}

fn slowdown_percent(round: &[Sample], subject: usize) -> f64 {
    (1.0 - round[subject].requests_per_second / round[ALONE].requests_per_second.max(1.0)) * 100.0
}

fn checks(rounds: &[Vec<Sample>], subjects: &[usize]) -> Vec<Check> {
    let slower = median_of(rounds, |round| slowdown_percent(round, WHYLATE));
    let mut checks = vec![
        Check::new(
            "BPF for one request, with all phases, less counting",
            median_of(rounds, |round| round[WHYLATE].own_ns),
            "ns",
            LIMIT_NS,
        ),
        Check::new("fewer requests a second", slower, "%", SLOWDOWN_LIMIT_PERCENT),
    ];
    if subjects.contains(&BIOSNOOP) {
        let ratio = median_of(rounds, |round| ratio(round, |sample| sample.bpf_ns));
        checks.push(Check::new("of biolatency and biosnoop together", ratio, "times", RATIO_LIMIT));
    }
    checks
}

/// Returns the ratio of a figure to that of biolatency and biosnoop together.
fn ratio(round: &[Sample], figure: impl Fn(&Sample) -> f64) -> f64 {
    figure(&round[WHYLATE]) / (figure(&round[BIOLATENCY]) + figure(&round[BIOSNOOP])).max(1.0)
}

fn markdown(rounds: &[Vec<Sample>], subjects: &[usize], checks: &[Check], heading: &str) -> String {
    let mut text = format!(
        "{heading}\nLoad: fio, random direct reads of 4 KiB, depth {DEPTH}, {SECONDS} s. BPF for one request is the run time of all programs of a \
         subject, as the kernel counts it, by the requests of fio; less counting is without the time of an empty program \
         for each run, nearly all of which the counting takes; fewer requests a second are without that counting, beside \
         nothing in the same round. Medians of {} rounds, the smallest and the largest in brackets.\n\n\
         | subject | BPF ns a request | less counting | requests/s | fewer % |\n|---|--:|--:|--:|--:|\n",
        rounds.len()
    );
    let spread = |figure: &dyn Fn(&Vec<Sample>) -> f64, digits: usize| {
        let Spread { median, min, max } = Spread::from_values(&rounds.iter().map(figure).collect::<Vec<_>>());
        format!("{median:.digits$} ({min:.digits$} to {max:.digits$})")
    };
    for &subject in subjects {
        let is_bpf = rounds.iter().any(|round| !round[subject].programs.is_empty());
        let bpf = |figure: &dyn Fn(&Vec<Sample>) -> f64| if is_bpf { spread(figure, 0) } else { "–".to_owned() };
        text += &format!(
            "| {} | {} | {} | {} | {} |\n",
            NAMES[subject],
            bpf(&|round| round[subject].bpf_ns),
            bpf(&|round| round[subject].own_ns),
            spread(&|round| round[subject].requests_per_second, 0),
            spread(&|round| slowdown_percent(round, subject), 2)
        );
    }
    if subjects.contains(&BIOSNOOP) {
        text += &format!(
            "\n`whylate block --table` by `biolatency` and `biosnoop` together: {}; less counting {}. `biosnoop` lost {} \
             % of its events.\n",
            spread(&|round| ratio(round, |sample| sample.bpf_ns), 2),
            spread(&|round| ratio(round, |sample| sample.own_ns), 2),
            spread(&|round| round[BIOSNOOP].lost * 100.0 / round[BIOSNOOP].requests.max(1.0), 1)
        );
    }
    if let Some(last) = rounds.last() {
        text += "\nEach program in the last round, mean ns:\n\n";
        for subject in [WHYLATE, BIOLATENCY, BIOSNOOP] {
            let programs = last[subject].programs.iter().filter(|program| program.runs > 0);
            let each =
                programs.map(|program| format!("`{}` {:.0} ({} runs)", program.name, program.mean_ns(), program.runs));
            let each: Vec<_> = each.collect();
            if !each.is_empty() {
                text += &format!("- {}: {}\n", NAMES[subject], each.join(", "));
            }
        }
    }
    text + &figures::table(checks, [2, 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_lost_events() {
        assert!((lost_events("lost 12 events on CPU #0\nlost 3 events on CPU #1\nlibbpf: lost\n") - 15.0).abs() < 1e-9);
        assert!(lost_events("").abs() < 1e-9);
    }
}
