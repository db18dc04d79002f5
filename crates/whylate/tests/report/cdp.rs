// SPDX-License-Identifier: MIT OR Apache-2.0
//! A browser driven over the Chrome DevTools Protocol: NUL-terminated JSON on descriptors 3 and 4.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::pipe;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Names of Chromium's executable.
const BROWSERS: [&str; 3] = ["chromium-headless-shell", "chromium", "chromium-browser"];
/// Timeout, far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);

pub struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    next: u64,
    session: Option<String>,
    /// Events received while waiting for results.
    pub events: Vec<Value>,
    _profile: TempDir,
}

fn installed() -> Option<&'static str> {
    BROWSERS.into_iter().find(|name| {
        let version = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    })
}

/// Starts a browser; `None` with a printed reason if there is none.
pub fn browser() -> Result<Option<Browser>> {
    let Some(name) = installed() else {
        // CI installs a browser: a missing one is a failure there.
        ensure!(std::env::var_os("CI").is_none(), "no chromium (scripts/install-deps browser)");
        println!("skipped: no chromium (scripts/install-deps browser)");
        return Ok(None);
    };
    let profile = tempfile::tempdir()?;
    let ((its_from, to), (from, its_to)) = (pipe()?, pipe()?);
    // The shell assigns descriptors 3 and 4, which may be in use in this process.
    for fd in [&its_from, &its_to] {
        fcntl_setfd(fd, FdFlags::empty())?;
    }
    let line = format!("exec 3<&{} 4>&{}; exec \"$@\"", its_from.as_raw_fd(), its_to.as_raw_fd());
    let mut command = Command::new("bash");
    command
        .args(["-c", &line, "browser", name])
        .args(["--remote-debugging-pipe", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg("about:blank")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let child = command.spawn().context("the browser does not start")?;
    drop((its_from, its_to));
    let from = BufReader::new(File::from(from));
    let mut browser =
        Browser { child, to: File::from(to), from, next: 0, session: None, events: Vec::new(), _profile: profile };
    let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))?;
    let attached = browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}))?;
    browser.session = attached["sessionId"].as_str().map(str::to_owned);
    for domain in ["Page", "Runtime", "Log", "Network"] {
        browser.call(&format!("{domain}.enable"), json!({}))?;
    }
    Ok(Some(browser))
}

impl Browser {
    /// Calls a method and returns its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.next += 1;
        let id = self.next;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes())?;
        loop {
            let message = self.read()?;
            if message["id"] != id {
                self.events.push(message);
                continue;
            }
            ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
            return Ok(message["result"].clone());
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut bytes = Vec::new();
        ensure!(self.from.read_until(0, &mut bytes)? > 0, "the browser has ended");
        bytes.pop();
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// Evaluates an expression.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let asked = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let message = self.call("Runtime.evaluate", asked)?;
        ensure!(message["exceptionDetails"].is_null(), "{expression}: {}", message["exceptionDetails"]);
        Ok(message["result"]["value"].clone())
    }

    /// Evaluates an expression to text.
    pub fn text(&mut self, expression: &str) -> Result<String> {
        let value = self.value(expression)?;
        value.as_str().map(str::to_owned).with_context(|| format!("{expression} is {value}"))
    }

    /// Waits until the expression is true.
    pub fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.value(expression)? != true {
            if Instant::now() > deadline {
                bail!("it does not come to {expression}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Opens a page and waits until its script is ready.
    pub fn open(&mut self, address: &str) -> Result<()> {
        self.call("Page.navigate", json!({"url": address}))?;
        self.until("document.documentElement !== null && document.documentElement.dataset.ready === 'yes'")
    }

    /// Presses the mouse button, moves, and releases.
    pub fn drag(&mut self, from: (f64, f64), to: (f64, f64)) -> Result<()> {
        for (what, (x, y), buttons) in [("mousePressed", from, 1), ("mouseMoved", to, 1), ("mouseReleased", to, 0)] {
            let event = json!({"type": what, "x": x, "y": y, "button": "left", "buttons": buttons, "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event)?;
        }
        Ok(())
    }

    /// Presses a key by name.
    pub fn press(&mut self, key: &str, code: u32) -> Result<()> {
        for what in ["keyDown", "keyUp"] {
            let text = if key == "Enter" && what == "keyDown" { "\r" } else { "" };
            let event = json!({"type": what, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", event)?;
        }
        Ok(())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The browser has child processes.
        if let Some(group) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
