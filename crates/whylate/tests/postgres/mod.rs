// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PostgreSQL server in its own directory, reached through a socket in it.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Timeout, far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// Debian's layout: a directory per version.
const VERSIONS: &str = "/usr/lib/postgresql";
/// The server refuses to run as root.
const NOBODY: u32 = 65_534;

/// Average number of client backends in each wait.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub row_lock: f64,
    pub client: f64,
    /// Locks of PostgreSQL's shared memory (`LWLock`).
    pub inner_lock: f64,
    pub file: f64,
}

/// A running server, stopped on drop.
pub struct Cluster {
    directory: TempDir,
    programs: PathBuf,
    server: Option<Child>,
}

/// Clients that generate load until they are dropped.
pub struct Load(Child);

impl Cluster {
    /// Returns `None` and prints why if PostgreSQL is not installed.
    pub fn start() -> Result<Option<Self>> {
        let Some(programs) = programs() else {
            println!("skipped: there is no PostgreSQL server with pgbench (scripts/install-deps programs)");
            return Ok(None);
        };
        // /tmp is often in memory: nothing would wait for a disk, and memory may be short.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
        if rustix::process::getuid().is_root() {
            chown(directory.path(), Some(NOBODY), Some(NOBODY))?;
        }
        let mut cluster = Cluster { directory, programs, server: None };
        cluster.run("initdb", &["--no-sync", "--auth=trust", "--username=postgres", "-D", "data"])?;
        let mut server = cluster.command("postgres");
        let socket = cluster.directory.path().to_owned();
        server.args(["-D", "data", "-c", "listen_addresses=", "-c", "max_connections=40", "-k"]).arg(socket);
        cluster.server = Some(server.stdout(Stdio::null()).stderr(cluster.log()?).spawn()?);
        let deadline = Instant::now() + TIMEOUT;
        while cluster.run("psql", &cluster.sql("select 1")).is_err() {
            ensure!(Instant::now() < deadline, "PostgreSQL does not start: {}", cluster.logged());
            sleep(POLL);
        }
        let (host, user) = (cluster.host(), "--username=postgres");
        cluster.run("pgbench", &["-i", "-q", "-s", "1", &host, user, "postgres"])?;
        Ok(Some(cluster))
    }

    /// Runs a pgbench workload.
    pub fn load(&self, workload: &str, clients: u32) -> Result<Load> {
        let mut command = self.command("pgbench");
        command.args(["-n", "-j", "1", "-T", "600", "-c", &clients.to_string(), "-b", workload]);
        command.args([&self.host(), "--username=postgres", "postgres"]);
        Ok(Load(command.stdout(Stdio::null()).stderr(self.log()?).spawn()?))
    }

    /// Samples the waits of the client backends 40 times a second. The sampling backend sleeps in the server, so that
    /// it is no client that the server waits for.
    pub fn sample(&self, seconds: f64) -> Result<Waiting> {
        let sql = format!(
            "create temp table seen (type text);
             create temp table times (at timestamptz);
             do $$ declare till timestamptz := clock_timestamp() + interval '{seconds}s'; begin
                 while clock_timestamp() < till loop
                     perform pg_sleep(0.025);
                     perform pg_stat_clear_snapshot();
                     insert into seen select wait_event_type from pg_stat_activity
                         where backend_type = 'client backend' and pid <> pg_backend_pid();
                     insert into times values (clock_timestamp());
                 end loop; end $$;
             select (select count(*) from seen where type = kind)::float8 / (select count(*) from times)
                 from unnest(array['Lock', 'Client', 'LWLock', 'IO']) with ordinality as kinds (kind, place) order by place"
        );
        let output = self.run("psql", &self.sql(&sql))?;
        let figures: Vec<f64> = output.lines().filter_map(|line| line.parse().ok()).collect();
        let [row_lock, client, inner_lock, file] = figures[..] else { bail!("no four figures: {output}") };
        Ok(Waiting { row_lock, client, inner_lock, file })
    }

    fn host(&self) -> String {
        format!("--host={}", self.directory.path().display())
    }

    fn sql(&self, sql: &str) -> Vec<String> {
        let options = ["-q", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "--username=postgres", "--dbname=postgres"];
        let mut arguments: Vec<String> = options.map(str::to_owned).into();
        arguments.extend([self.host(), "-c".to_owned(), sql.to_owned()]);
        arguments
    }

    /// Builds a command of one of its programs, in its directory; the process is killed with the test.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        if rustix::process::getuid().is_root() {
            command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
        }
        // SIGINT is a fast shutdown of the server.
        command.args(["--pdeathsig", "INT", "--"]).arg(self.programs.join(program));
        command.current_dir(self.directory.path()).stdin(Stdio::null());
        command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C");
        command
    }

    fn run(&self, program: &str, arguments: &[impl AsRef<OsStr>]) -> Result<String> {
        let output = self.command(program).args(arguments).output().context("there is no setpriv")?;
        ensure!(output.status.success(), "{program} fails: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    fn log(&self) -> Result<File> {
        Ok(File::options().create(true).append(true).open(self.directory.path().join("log"))?)
    }

    fn logged(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let Some(mut server) = self.server.take() else { return };
        // An immediate shutdown: kills its processes and frees its shared memory, without writing.
        let _ = kill_process(Pid::from_child(&server), Signal::QUIT);
        let _ = server.wait();
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the program directory of the newest version that has all programs.
fn programs() -> Option<PathBuf> {
    let has_all = |directory: &PathBuf| {
        ["initdb", "postgres", "psql", "pgbench"].iter().all(|program| Path::new(directory).join(program).exists())
    };
    let version = |directory: &PathBuf| directory.parent()?.file_name()?.to_str()?.parse::<u32>().ok();
    let versions = fs::read_dir(VERSIONS).ok()?.flatten().map(|version| version.path().join("bin"));
    versions.filter(has_all).max_by_key(version)
}
