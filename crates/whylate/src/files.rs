// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files written for the user. They have data of all users' processes, and root may write them in a directory where
//! other users can plant a file or link first.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, fcntl_setfl, linkat};
use rustix::process::geteuid;

/// Permissions: only the owner reads and writes.
const MODE: u32 = 0o600;

/// Creates a file, or truncates one of the user's own. Refuses files of other users and links.
///
/// # Errors
/// Fails if the file belongs to another user, is a symbolic link or has further hard links, or the file system refuses.
pub fn create(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Creates a file, or opens one of the user's own without truncating it.
///
/// # Errors
/// Fails as `create` does.
pub fn open(path: &Path) -> io::Result<File> {
    match create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open_own(path),
        made => made,
    }
}

/// Writes a whole file, or nothing.
///
/// # Errors
/// Fails if `create`, `write` or the file system does.
pub fn write<T, E: From<io::Error>>(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T, E>) -> Result<T, E> {
    let mut file = PendingFile::new(path)?;
    let written = write(&mut file)?;
    file.end()?;
    Ok(written)
}

/// A file that is written piece by piece and appears at `end`. An existing file is replaced only then.
#[derive(Debug)]
pub struct PendingFile {
    out: BufWriter<File>,
    path: PathBuf,
    location: Location,
}

/// Location of the data until `end`.
#[derive(Debug)]
enum Location {
    /// A file without a name (`O_TMPFILE`), which vanishes with its writer, however that ends.
    Unnamed,
    /// A temporary file, where the file system does not support `O_TMPFILE` (NFS, FUSE, overlayfs before 6.3).
    Named(PathBuf),
    /// The final file: a device, a FIFO, or a file in a directory where no other can be created.
    Itself,
}

impl PendingFile {
    /// Starts a file that `create` could create.
    ///
    /// # Errors
    /// Fails as `create` does.
    pub fn new(path: &Path) -> io::Result<Self> {
        let path = path.to_owned();
        // Fails early if the file may not be written.
        let there = match fs::symlink_metadata(&path) {
            Ok(about) => Some((open_own(&path)?, about.is_file())),
            Err(_) => None,
        };
        let there = match there {
            Some((file, false)) => {
                return Ok(PendingFile { out: BufWriter::new(file), path, location: Location::Itself });
            }
            there => there.map(|(file, _)| file),
        };
        if let Some(file) = create_unnamed(&path) {
            return Ok(PendingFile { out: BufWriter::new(file), path, location: Location::Unnamed });
        }
        let temporary = temporary_name(&path)?;
        match (create_new(&temporary), there) {
            // The user's file in a directory where no file can be created.
            (Err(error), Some(file)) if error.kind() == io::ErrorKind::PermissionDenied => {
                file.set_len(0)?;
                Ok(PendingFile { out: BufWriter::new(file), path, location: Location::Itself })
            }
            (made, _) => Ok(PendingFile { out: BufWriter::new(made?), path, location: Location::Named(temporary) }),
        }
    }

    /// Writes all data, and gives the file a temporary name in its final directory. Then `end` only has to rename the file.
    ///
    /// # Errors
    /// Fails if the file system does.
    pub fn settle(&mut self) -> io::Result<()> {
        self.out.flush()?;
        if matches!(self.location, Location::Unnamed) {
            let temporary = temporary_name(&self.path)?;
            linkat(CWD, proc_path(self.out.get_ref()), CWD, &temporary, AtFlags::SYMLINK_FOLLOW)?;
            self.location = Location::Named(temporary);
        }
        Ok(())
    }

    /// Completes the file.
    ///
    /// # Errors
    /// Fails if the file system does.
    pub fn end(mut self) -> io::Result<()> {
        self.settle()?;
        if let Location::Named(temporary) = &self.location {
            fs::rename(temporary, &self.path)?;
            self.location = Location::Itself;
        }
        Ok(())
    }

    /// Returns the final path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Creates an unnamed file in the directory of a path. `None` where that is not supported.
fn create_unnamed(path: &Path) -> Option<File> {
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unnamed = OFlags::TMPFILE.bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(unnamed).mode(MODE).open(directory).ok()?;
    // Without procfs only root could link the file.
    fs::symlink_metadata(proc_path(&file)).is_ok().then_some(file)
}

/// Returns the path by which linkat(2) can give an `O_TMPFILE` file a name, as open(2) describes.
fn proc_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Returns an unused name in the same directory.
fn temporary_name(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(|| refused("has no name"))?);
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    // A killed process with this PID may have left one.
    let _ = fs::remove_file(&temporary);
    Ok(temporary)
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Location::Named(temporary) = &self.location {
            remove_if_same(self.out.get_ref(), temporary);
        }
    }
}

/// Checks early whether a file can be created later.
///
/// # Errors
/// Fails as `create` does.
pub fn try_to_create(path: &Path) -> io::Result<()> {
    let existed = fs::symlink_metadata(path).is_ok();
    let file = open(path)?;
    if !existed {
        remove_if_same(&file, path);
    }
    Ok(())
}

/// Removes a file unless another one has taken its name.
pub fn remove_if_same(file: &File, path: &Path) {
    if is_at(file, path) {
        let _ = fs::remove_file(path);
    }
}

/// Returns whether the path still names this file.
fn is_at(file: &File, path: &Path) -> bool {
    let identity = |about: io::Result<Metadata>| about.map(|about| (about.dev(), about.ino())).ok();
    identity(file.metadata()).is_some_and(|one| identity(fs::symlink_metadata(path)) == Some(one))
}

fn open_own(path: &Path) -> io::Result<File> {
    // Does not wait for the reader of a FIFO.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => refused("is a symbolic link"),
        Some(code) if code == rustix::io::Errno::NXIO.raw_os_error() => refused("is a FIFO without a reader"),
        _ => error,
    })?;
    let about = file.metadata()?;
    // Devices, such as /dev/null, belong to root.
    if about.uid() != geteuid().as_raw() && !about.file_type().is_char_device() {
        return Err(refused("belongs to another user"));
    }
    if about.is_file() {
        if about.nlink() > 1 {
            return Err(refused("has more than one hard link"));
        }
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    fcntl_setfl(&file, OFlags::empty())?;
    Ok(file)
}

/// Creates a file that does not exist yet.
///
/// # Errors
/// Fails if the file exists, or the file system refuses.
pub fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)
}

/// Returns the path if it is free, or else the first free one with a number before the extension.
pub fn free(path: PathBuf) -> PathBuf {
    let part = |part: Option<&OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let numbered =
        |number: u32| path.with_file_name(format!("{}-{number}.{}", part(path.file_stem()), part(path.extension())));
    let is_free = |path: &PathBuf| fs::symlink_metadata(path).is_err();
    std::iter::once(path.clone()).chain((2..1000).map(numbered)).find(is_free).unwrap_or(path)
}

fn refused(why: &str) -> io::Error {
    io::Error::other(format!("it {why} (choose another file)"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn truncates_own_file_and_makes_it_private() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a");
        fs::write(&path, "something long").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("set");
        create(&path).expect("made").write_all(b"new").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "new");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, MODE);
        assert!(create_new(&path).is_err());
        let other = directory.path().join("b");
        create_new(&other).expect("made");
        assert_eq!(fs::metadata(&other).expect("there").mode() & 0o777, MODE);
    }

    #[test]
    fn refuses_links_and_files_of_other_users() {
        let directory = tempfile::tempdir().expect("a directory");
        let (secret, path) = (directory.path().join("secret"), directory.path().join("a"));
        fs::write(&secret, "content").expect("written");
        symlink(&secret, &path).expect("linked");
        assert!(create(&path).expect_err("a link").to_string().contains("symbolic link"));
        fs::remove_file(&path).expect("removed");
        fs::hard_link(&secret, &path).expect("linked");
        assert!(create(&path).expect_err("a hard link").to_string().contains("hard link"));
        fs::remove_file(&path).expect("removed");
        // Only root can change a file's owner, and write to other users' files.
        fs::write(&path, "theirs").expect("written");
        if chown(&path, Some(65_534), None).is_ok() {
            assert!(create(&path).expect_err("somebody else's").to_string().contains("another user"));
            assert_eq!(fs::read_to_string(&path).expect("there"), "theirs");
        }
        assert_eq!(fs::read_to_string(&secret).expect("there"), "content");
    }

    #[test]
    fn failed_write_keeps_existing_file_or_leaves_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a");
        let fails =
            || write(&path, |out| out.write_all(b"part").and(Err::<(), _>(io::Error::other("nothing to draw"))));
        assert!(fails().is_err() && !path.exists());
        assert!(try_to_create(&path).is_ok() && !path.exists());
        write(&path, |out| out.write_all(b"all")).expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "all");
        assert!(fails().is_err() && fs::read_to_string(&path).expect("there") == "all");
    }

    #[test]
    fn pending_file_appears_only_at_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a");
        let begin = || {
            let mut file = PendingFile::new(&path).expect("made");
            file.write_all(b"all").expect("written");
            file
        };
        let unfinished = begin();
        // A process that is killed now leaves no file.
        assert!(create_unnamed(&path).is_none() || fs::read_dir(directory.path()).expect("there").count() == 0);
        drop(unfinished);
        assert!(!path.exists());
        begin().end().expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "all");
        drop(begin());
        assert_eq!(fs::read_dir(directory.path()).expect("there").count(), 1);
    }

    #[test]
    fn does_not_block_on_fifo_without_reader() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        let refused = create(&path).expect_err("no reader").to_string();
        assert!(made.success() && refused.contains("without a reader"), "{refused}");
    }
}
