// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cost of watching I/O requests with whylate, and with biolatency, biosnoop and blktrace, on the same fio load.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::child;
use crate::drivers::{count_beside_empty, in_rounds};
use crate::kernel;
use crate::programs::{Counts, total};
use crate::results::{Arguments as Common, Section};
use crate::subject::{NOTHING, Ready, Subject};
use crate::table::{Figure, Show, column, grid, median};

const DEPTH: u32 = 128;
const SECONDS: u32 = 4;

#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    results: Common,
    /// libbpf-tools' biolatency.
    #[arg(long, value_name = "PROGRAM", default_value = "biolatency")]
    biolatency: PathBuf,
    /// libbpf-tools' biosnoop; left out where it does not run.
    #[arg(long, value_name = "PROGRAM", default_value = "biosnoop")]
    biosnoop: PathBuf,
}

const BIOLATENCY: &str = "`biolatency`";
const BIOSNOOP: &str = "`biosnoop`";
const BLKTRACE: &str = "`blktrace`";

struct Sample {
    requests_per_second: f64,
    /// Fewer requests per second than without a subject, in percent.
    fewer_percent: f64,
    /// Run time of all BPF programs per request, and that less the time of counting: the mean run time of an empty
    /// program beside them, for each run. NaN without programs.
    costs_ns: [f64; 2],
    programs: Vec<Counts>,
    /// Events that the tool reports as lost, in percent of the requests.
    lost_percent: f64,
    /// `costs_ns` relative to biolatency and biosnoop together.
    ratios: [f64; 2],
}

/// A file that is written once, removed on drop.
struct Load(tempfile::NamedTempFile);

impl Load {
    fn make() -> Result<Load> {
        let load = Load(tempfile::NamedTempFile::new_in(".").context("cannot make a file here")?);
        load.fio("--rw=write --bs=1m")?;
        Ok(load)
    }

    fn fio(&self, options: &str) -> Result<serde_json::Value> {
        let file = format!("--filename={}", self.0.path().display());
        let fixed = ["--name=load", &file, "--size=256m", "--direct=1", "--output-format=json"];
        child::json(Command::new("fio").args(fixed).args(options.split(' ')))
    }

    /// Returns fio's requests per second, and their total number.
    fn read(&self) -> Result<(f64, f64)> {
        let options = "--rw=randread --bs=4k --ioengine=libaio --time_based";
        let report = self.fio(&format!("{options} --iodepth={DEPTH} --runtime={SECONDS}"))?;
        let read = &report["jobs"][0]["read"];
        let figure = |name: &str| read[name].as_f64().with_context(|| format!("fio does not print {name}"));
        Ok((figure("iops")?, figure("total_ios")?))
    }
}

/// Returns blktrace of the block device that a file lies on.
fn blktrace(file: &Path) -> Result<Subject> {
    let number = fs::metadata(file)?.dev();
    let directory = PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number)));
    let facts = fs::read_to_string(directory.join("uevent")).context("the file lies on no block device")?;
    let name = facts.lines().find_map(|line| line.strip_prefix("DEVNAME=")).context("its device has no name")?;
    let command = ["blktrace", "-d", &format!("/dev/{name}"), "-o", "-"];
    Ok(Subject::new(BLKTRACE, "", &command, Ready::Setting(directory.join("trace/enable"))))
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let [biolatency, biosnoop] = [&arguments.biolatency, &arguments.biosnoop].map(|path| path.to_string_lossy());
    let tools = [("fio", "no fio to make requests"), (&*biolatency, "no biolatency to compare with")];
    let Some(whylate) = arguments.results.prepare("bench-block", &tools)? else { return Ok(true) };
    let (load, whylate) = (Load::make()?, whylate.to_string_lossy());
    let tool = |name, command: &[&str]| Subject::new(name, "", command, Ready::Programs(1));
    let mut subjects = vec![
        Subject::nothing(),
        tool("`whylate block --table`", &[&whylate, "block", "--table"]),
        tool(BIOLATENCY, &[&biolatency]),
        tool("`whylate block`", &[&whylate, "block"]),
    ];
    // Left out if they do not run. Under load, as a tool that has loaded its programs may still fail to attach them.
    let mut refused = Vec::new();
    for (name, subject) in [(BIOSNOOP, Ok(tool(BIOSNOOP, &[&biosnoop]))), (BLKTRACE, blktrace(load.0.path()))] {
        let tried = subject.and_then(|subject| {
            let running = subject.start(false)?;
            load.read()?;
            running.end()?;
            Ok(subject)
        });
        match tried {
            Ok(subject) => subjects.push(subject),
            Err(error) => {
                refused.push(format!("- {name} does not run here, and is left out: {error:#}").replace('\n', "; "))
            }
        }
    }
    let names: Vec<&str> = subjects.iter().map(|subject| subject.name).collect();
    let which = |name: &str| names.iter().position(|&other| other == name);
    let rounds = arguments.results.rounds;
    let mut measured = in_rounds("requests", (rounds, true), &names, |which| sample(&subjects[which], &load))?;
    for round in &mut measured.0 {
        compare(round, which(BIOLATENCY).zip(which(BIOSNOOP)));
    }

    // The second subject.
    let (ours, with_biosnoop) = (1, which(BIOSNOOP));
    let fewer = measured.median(ours, |sample| sample.fewer_percent);
    let own_ns = measured.median(ours, |sample| sample.costs_ns[1]);
    let mut figures = vec![
        Figure::new("BPF for one request, with all phases, less counting", own_ns, 2).unit("ns").at_most(400.0),
        Figure::new("fewer requests a second", fewer, 2).unit("%").at_most(2.0),
    ];
    if let Some(biosnoop) = with_biosnoop {
        let [all, own] = [0, 1].map(|which: usize| measured.values(ours, |sample| sample.ratios[which]));
        let lost = measured.values(biosnoop, |sample| sample.lost_percent);
        let shown = |values: &[f64], digits| Show::Spread(digits).cell(values, "");
        let what = "BPF for one request divided by that of `biolatency` and `biosnoop` together";
        figures.push(Figure::new(what, median(&all), 2).at_most(0.7));
        figures.push(Figure::text("that ratio, with minimum and maximum", shown(&all, 2)));
        figures.push(Figure::text("that ratio, less counting", shown(&own, 2)));
        figures.push(Figure::text("events that `biosnoop` lost (%)", shown(&lost, 1)));
    }
    let given = [("biolatency", &arguments.biolatency), ("biosnoop", &arguments.biosnoop)];
    let given = given.into_iter().filter(|(option, program)| *program != Path::new(option));
    let options: String = given.map(|(option, _)| format!(" --{option} PROGRAM")).collect();
    let columns = [
        column("BPF ns a request", Show::Spread(0), "", |sample: &Sample| sample.costs_ns[0]),
        column("less counting", Show::Spread(0), "", |sample| sample.costs_ns[1]),
        column("requests/s", Show::Spread(0), "", |sample| sample.requests_per_second),
        column("fewer %", Show::Spread(2), "", |sample| sample.fewer_percent),
    ];
    let last = measured.0.last().map_or(&[][..], |round| round);
    let details = names.iter().zip(last).map(|(name, sample)| details_line(name, &sample.programs));
    let section = Section::new(&arguments.results, "block").figures(figures);
    refused
        .iter()
        .fold(section, |section, refused| section.line("machine", refused))
        .values(&[("options", &options), ("depth", &DEPTH), ("seconds", &SECONDS)])
        .add("table", grid("subject", &columns, measured.rows(names.iter().map(|&name| name.to_owned()))))
        .add("programs", details.collect::<String>())
        .publish()
}

/// Measures requests per second without the kernel's counting of BPF run time, which costs more than some programs.
fn sample(subject: &Subject, load: &Load) -> Result<Sample> {
    let running = subject.start(false)?;
    let (requests_per_second, mut requests) = load.read()?;
    let (mut costs_ns, mut programs) = ([f64::NAN; 2], Vec::new());
    if subject.name != NOTHING && subject.name != BLKTRACE {
        let _counting = kernel::count_run_times()?;
        let ((_, more), counts, empty_ns) = count_beside_empty(&running, || load.read())?;
        let [run_ns, runs] = [total(&counts, |counts| counts.run_ns), total(&counts, |counts| counts.runs)];
        costs_ns = [run_ns, run_ns - runs * empty_ns].map(|ns| ns / more.max(1.0));
        requests += more;
        programs = counts;
    }
    let lost_percent = lost_events(&running.end()?) * 100.0 / requests.max(1.0);
    let (fewer_percent, ratios) = (f64::NAN, [f64::NAN; 2]);
    Ok(Sample { requests_per_second, fewer_percent, costs_ns, programs, lost_percent, ratios })
}

/// Compares the samples of a round with that without a subject, and with those of the two peers together.
fn compare(round: &mut [Sample], peers: Option<(usize, usize)>) {
    let unwatched = round[0].requests_per_second.max(1.0);
    let sum_ns = |which: usize| peers.map_or(f64::NAN, |(a, b)| round[a].costs_ns[which] + round[b].costs_ns[which]);
    let sums_ns = [sum_ns(0), sum_ns(1)];
    for sample in round {
        sample.fewer_percent = (1.0 - sample.requests_per_second / unwatched) * 100.0;
        sample.ratios = [0, 1].map(|which| sample.costs_ns[which] / sums_ns[which]);
    }
}

/// Sums biosnoop's messages about lost events.
fn lost_events(errors: &str) -> f64 {
    let counts = errors.lines().filter_map(|line| line.strip_prefix("lost ")?.split(' ').next()?.parse::<u64>().ok());
    counts.sum::<u64>() as f64
}

/// Returns a line with the programs that have run; none without programs.
fn details_line(subject: &str, programs: &[Counts]) -> String {
    let programs = programs.iter().filter(|program| program.runs > 0);
    let each = programs.map(|program| format!("`{}` {:.0} ({} runs)", program.name, program.mean_ns(), program.runs));
    let each = each.collect::<Vec<_>>().join(", ");
    if each.is_empty() { each } else { format!("- {subject}: {each}\n") }
}

#[cfg(test)]
#[path = "../unit/block.rs"]
mod tests;
