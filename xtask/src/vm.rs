// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a command on another kernel, in a fully emulated virtual machine that needs no permission of the host.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::register_usize;

use crate::host::{self, cannot_run};
use crate::initramfs::{self, Contents};
use crate::kernels;
use crate::output::{Output, new_mark};
use crate::processor::Processor;
use crate::wake;

/// Exit status of a command that timed out, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// Added to the number of the signal that ended the run.
const SIGNALLED: u8 = 128;
/// How long a machine may sleep; longer than `torture.sh` takes for late.
const ASLEEP: Duration = Duration::from_secs(6);
/// Time for a machine to exit after its output has ended.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Period at which signals are checked.
const POLL: Duration = Duration::from_millis(100);
const MEBIBYTE: u64 = 1 << 20;

/// Runs a command on another kernel, in QEMU, and exits with its status: 124 if it takes too long, 125 if the kernel
/// does not run it.
///
/// The machine has two CPUs, no network, and a disk only with --disk; when it sleeps, it is woken after 6 s. In it are
/// busybox, whylate (built by `make static` or `static-arm64`), tools to compare with that are installed here and run
/// there, and what --with names. Standard error of the command comes with its standard output.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// One of `cargo xtask kernels`, or the path of a kernel image
    kernel: String,
    /// A program, file or directory that is to be there, at the same path, with the libraries it needs
    #[arg(long, value_name = "PATH")]
    with: Vec<OsString>,
    /// Leave out the tools to compare with: it starts sooner
    #[arg(long)]
    no_tools: bool,
    /// Leave out whylate, and do not build it
    #[arg(long)]
    no_whylate: bool,
    /// Seconds after which it fails
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Memory; by default as much as what is in it needs
    #[arg(long, value_name = "MEBIBYTES")]
    memory: Option<u64>,
    /// Give it an empty disk of this size in mebibytes: /dev/nvme0n1, where the kernel has its driver built in. It
    /// serves 100 requests a second
    #[arg(long, value_name = "MEBIBYTES")]
    disk: Option<u64>,
    /// Write the kernel's messages there
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// More words for the kernel's command line
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true)]
    append: Option<String>,
    /// The command and its arguments, after NAME=VALUE for its environment; no shell reads them
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

/// Runs the command, and returns its status.
pub fn run(arguments: &Arguments) -> Result<u8> {
    let kernel = kernels::find(&arguments.kernel)?;
    let processor = Processor::detect(&kernel)?;
    let whylate = if arguments.no_whylate { None } else { Some(static_whylate(processor)?) };
    // A signal ends the machine and removes its files.
    let signal = Arc::new(AtomicUsize::new(0));
    for known in [SIGHUP, SIGINT, SIGTERM] {
        register_usize(known, Arc::clone(&signal), known as usize)?;
    }
    let directory = tempfile::tempdir()?;
    let console = arguments.console.clone().unwrap_or_else(|| directory.path().join("console"));
    let archive = directory.path().join("initramfs");
    let mark = new_mark();
    let contents = Contents {
        busybox: busybox(processor, &kernel)?,
        line: processor.line().1,
        whylate,
        modules: Some(kernel.with_file_name("modules")).filter(|modules| modules.is_dir()),
        with: &arguments.with,
        tools: !arguments.no_tools && processor.is_this(),
        command: &arguments.command,
        mark: &mark,
    };
    initramfs::write(&contents, fs::File::create(&archive)?)?;
    // Unpacking needs room for both copies, and files may take half of the memory at most.
    let memory = arguments.memory.unwrap_or(1024.max(512 + 3 * fs::metadata(&archive)?.len() / MEBIBYTE));

    let mut devices = vec![OsString::from("-serial"), option_of("file:", &console)];
    let socket = directory.path().join("wake");
    wake::wake_when_asleep(&socket, ASLEEP)?;
    devices.extend([OsString::from("-qmp"), option_of("unix:", &socket)]);
    if let Some(mebibytes) = arguments.disk {
        let disk = directory.path().join("disk");
        fs::File::create(&disk)?.set_len(mebibytes * MEBIBYTE)?;
        // Writes only reach the host's memory, so without a limit they would be done before an emulated CPU waits.
        let drive = option_of("if=none,id=disk,format=raw,cache=unsafe,throttling.iops-total=100,file=", &disk);
        let words = ["-device", "nvme,drive=disk,serial=whylate"].map(OsString::from);
        devices.extend([OsString::from("-drive"), drive].into_iter().chain(words));
    }

    let mut machine = Machine::start(processor, &kernel, &archive, &devices, memory, arguments.append.as_deref())?;
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    let mut output = Output::new(io::stdout().lock(), &mark);
    let bytes = machine.output()?;
    loop {
        let received = bytes.recv_timeout(POLL);
        let ended_by = signal.load(Ordering::Relaxed) as u8;
        if ended_by != 0 {
            return Ok(SIGNALLED + ended_by);
        }
        match received {
            Ok(bytes) => {
                if let Some(status) = output.take(&bytes)? {
                    return Ok(status);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let ended = machine.ended();
                bail!(
                    "the kernel ended before the command did, QEMU with {ended}; its last messages:\n{}",
                    last_lines(&console)
                )
            }
        }
        if Instant::now() >= deadline {
            return Ok(timed_out(arguments.timeout, &console));
        }
    }
}

fn timed_out(timeout_s: u64, console: &Path) -> u8 {
    eprintln!("xtask: the command has not ended after {timeout_s} s: --timeout gives it more");
    eprintln!("{}", last_lines(console));
    TIMED_OUT
}

/// Builds the static program if its sources are newer.
fn static_whylate(processor: Processor) -> Result<PathBuf> {
    let (target, path) = processor.whylate();
    host::run(Command::new("make").args(["--silent", target]).current_dir(host::root()))?;
    Ok(host::target().join(path))
}

/// Returns the host's busybox, or the one beside a kernel of another architecture.
fn busybox(processor: Processor, kernel: &Path) -> Result<PathBuf> {
    if processor.is_this() {
        let busybox = host::which("busybox".as_ref());
        return busybox.ok_or_else(|| cannot_run("busybox", io::ErrorKind::NotFound.into()));
    }
    let busybox = kernel.with_file_name("busybox");
    ensure!(busybox.is_file(), "put a static busybox of the kernel's processor at {}", busybox.display());
    Ok(busybox)
}

/// Returns a QEMU option that ends with a path, with commas doubled.
fn option_of(begin: &str, path: &Path) -> OsString {
    let parts = path.as_os_str().as_bytes().split(|&byte| byte == b',').collect::<Vec<_>>();
    OsString::from_vec([begin.as_bytes(), &parts.join(&b",,"[..])].concat())
}

/// A running QEMU, killed with this process in any case.
struct Machine(Child);

impl Machine {
    fn start(
        processor: Processor,
        kernel: &Path,
        archive: &Path,
        devices: &[OsString],
        memory: u64,
        append: Option<&str>,
    ) -> Result<Self> {
        let of_console = format!("console={}", processor.console());
        let mut words = vec![of_console.as_str(), "loglevel=5", "panic=-1", "nowatchdog"];
        // A CPU stuck at an emulated breakpoint ends the machine before the caller's timeout.
        words.extend(["rcupdate.rcu_cpu_stall_timeout=60", "sysctl.kernel.panic_on_rcu_stall=1"]);
        words.extend(append);
        let qemu = processor.qemu();
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", qemu, "-accel", "tcg,thread=multi"])
            .args(processor.machine())
            .args(["-smp", "2", "-m", &memory.to_string(), "-no-reboot", "-nodefaults", "-display", "none"])
            .args(devices)
            .args(processor.line().0)
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(archive)
            .args(["-append", &words.join(" ")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if host::which(qemu.as_ref()).is_none() {
            return Err(cannot_run(qemu, io::ErrorKind::NotFound.into()));
        }
        Ok(Self(command.spawn().map_err(|error| cannot_run("setpriv", error))?))
    }

    /// Describes the exit status, waiting for it after the end of the output.
    fn ended(&mut self) -> String {
        let deadline = Instant::now() + EXIT_TIMEOUT;
        while Instant::now() < deadline {
            if let Ok(Some(status)) = self.0.try_wait() {
                return status.to_string();
            }
            thread::sleep(POLL);
        }
        "no status yet".to_owned()
    }

    /// Returns the command's output as it comes.
    fn output(&mut self) -> Result<Receiver<Vec<u8>>> {
        let mut stdout = self.0.stdout.take().context("the output is in use")?;
        let (send, receive) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = stdout.read(&mut bytes) {
                if send.send(bytes[..length].to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(receive)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the last lines of the kernel's messages.
fn last_lines(console: &Path) -> String {
    let text = fs::read(console).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
