// SPDX-License-Identifier: MIT OR Apache-2.0
//! Files that are written for the user. They tell of everybody's programs, and whoever writes them may be root in a
//! folder where others can put something first.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, fcntl_setfl, linkat};
use rustix::process::geteuid;

/// Only its owner reads it.
const MODE: u32 = 0o600;

/// Makes a file, or empties one of the user's own. Nothing is written to what is somebody else's, and through no link.
///
/// # Errors
/// When it is somebody else's, a link, or has another name, or the file system refuses.
pub fn create(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Makes a file, or opens one of the user's own as it is.
///
/// # Errors
/// As above.
pub fn open(path: &Path) -> io::Result<File> {
    match create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open_own(path),
        made => made,
    }
}

/// Writes a file as a whole, or not at all.
///
/// # Errors
/// Those of `create`, of the file system, and of whoever writes.
pub fn write<T, E: From<io::Error>>(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T, E>) -> Result<T, E> {
    let mut file = Begun::new(path)?;
    let written = write(&mut file)?;
    file.end()?;
    Ok(written)
}

/// A file that is written bit by bit, and is there once it is ended. One that was there before stays until then.
#[derive(Debug)]
pub struct Begun {
    out: BufWriter<File>,
    path: PathBuf,
    meanwhile: Meanwhile,
}

/// What a file is called while it is written.
#[derive(Debug)]
enum Meanwhile {
    /// Nothing: it has no name, and is gone with whoever writes it, however that ends.
    Unnamed,
    /// Where the file system has no files without names (`O_TMPFILE`: NFS, FUSE, overlayfs before 6.3).
    Named(PathBuf),
    /// As it will be: a device, a FIFO, or a file in a folder where no other can be made.
    Itself,
}

impl Begun {
    /// Begins it, where `create` would make it.
    ///
    /// # Errors
    /// As above.
    pub fn new(path: &Path) -> io::Result<Self> {
        let path = path.to_owned();
        // What may not be written is refused before anything is.
        let there = match fs::symlink_metadata(&path) {
            Ok(about) => Some((open_own(&path)?, about.is_file())),
            Err(_) => None,
        };
        let there = match there {
            Some((file, false)) => return Ok(Begun { out: BufWriter::new(file), path, meanwhile: Meanwhile::Itself }),
            there => there.map(|(file, _)| file),
        };
        if let Some(file) = unnamed_beside(&path) {
            return Ok(Begun { out: BufWriter::new(file), path, meanwhile: Meanwhile::Unnamed });
        }
        let beside = name_beside(&path)?;
        match (create_new(&beside), there) {
            // A file of one's own in a folder where nothing can be made.
            (Err(error), Some(file)) if error.kind() == io::ErrorKind::PermissionDenied => {
                file.set_len(0)?;
                Ok(Begun { out: BufWriter::new(file), path, meanwhile: Meanwhile::Itself })
            }
            (made, _) => Ok(Begun { out: BufWriter::new(made?), path, meanwhile: Meanwhile::Named(beside) }),
        }
    }

    /// All is written.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn end(mut self) -> io::Result<()> {
        self.out.flush()?;
        if matches!(self.meanwhile, Meanwhile::Unnamed) {
            let beside = name_beside(&self.path)?;
            linkat(CWD, own_name_of(self.out.get_ref()), CWD, &beside, AtFlags::SYMLINK_FOLLOW)?;
            self.meanwhile = Meanwhile::Named(beside);
        }
        if let Meanwhile::Named(beside) = &self.meanwhile {
            fs::rename(beside, &self.path)?;
            self.meanwhile = Meanwhile::Itself;
        }
        Ok(())
    }
}

/// A file without a name, which can be given one in the folder of a path; `None` where that is not to be had.
fn unnamed_beside(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unnamed = OFlags::TMPFILE.bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(unnamed).mode(MODE).open(folder).ok()?;
    // Without procfs no user but root could name it.
    fs::symlink_metadata(own_name_of(&file)).is_ok().then_some(file)
}

/// `open(2)`, `O_TMPFILE`: how it is given a name.
fn own_name_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A free name in the same folder.
fn name_beside(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or_else(|| refused("has no name"))?);
    name.push(format!(".{}.tmp", std::process::id()));
    let beside = path.with_file_name(name);
    // Of a process of this number that was killed.
    let _ = fs::remove_file(&beside);
    Ok(beside)
}

impl Write for Begun {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Meanwhile::Named(beside) = &self.meanwhile {
            take_away(self.out.get_ref(), beside);
        }
    }
}

/// Finds out whether a file can be made, long before it is written.
///
/// # Errors
/// As above.
pub fn try_to_create(path: &Path) -> io::Result<()> {
    let was_there = fs::symlink_metadata(path).is_ok();
    let file = open(path)?;
    if !was_there {
        take_away(&file, path);
    }
    Ok(())
}

/// Removes a file that nobody is to have.
pub fn take_away(file: &File, path: &Path) {
    if is_at(file, path) {
        let _ = fs::remove_file(path);
    }
}

/// Nobody has put something else there.
fn is_at(file: &File, path: &Path) -> bool {
    let place = |about: io::Result<Metadata>| about.map(|about| (about.dev(), about.ino())).ok();
    place(file.metadata()).is_some_and(|one| place(fs::symlink_metadata(path)) == Some(one))
}

fn open_own(path: &Path) -> io::Result<File> {
    // Not even a FIFO without a reader is waited for.
    let careful = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(careful).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => refused("is a symbolic link"),
        Some(code) if code == rustix::io::Errno::NXIO.raw_os_error() => refused("is a FIFO that nobody reads"),
        _ => error,
    })?;
    let about = file.metadata()?;
    // Devices, such as /dev/null, are the system's.
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

/// Makes a file that is not there yet.
///
/// # Errors
/// When it is there, or the file system refuses.
pub fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)
}

/// The name, or the first one with a number before its extension that nothing has.
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
    fn a_file_of_ones_own_is_emptied_and_closed_to_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        fs::write(&path, "something long").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(0o666)).expect("set");
        create(&path).expect("made").write_all(b"new").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "new");
        assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, MODE);
        assert!(create_new(&path).is_err());
        let other = folder.path().join("b");
        create_new(&other).expect("made");
        assert_eq!(fs::metadata(&other).expect("there").mode() & 0o777, MODE);
    }

    #[test]
    fn nothing_is_written_through_links_or_to_files_of_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let (secret, path) = (folder.path().join("secret"), folder.path().join("a"));
        fs::write(&secret, "content").expect("written");
        symlink(&secret, &path).expect("linked");
        assert!(create(&path).expect_err("a link").to_string().contains("symbolic link"));
        fs::remove_file(&path).expect("removed");
        fs::hard_link(&secret, &path).expect("linked");
        assert!(create(&path).expect_err("a hard link").to_string().contains("hard link"));
        fs::remove_file(&path).expect("removed");
        // Only root can give files away, and only root can write to those of others.
        fs::write(&path, "theirs").expect("written");
        if chown(&path, Some(65_534), None).is_ok() {
            assert!(create(&path).expect_err("somebody else's").to_string().contains("another user"));
            assert_eq!(fs::read_to_string(&path).expect("there"), "theirs");
        }
        assert_eq!(fs::read_to_string(&secret).expect("there"), "content");
    }

    #[test]
    fn what_cannot_be_ended_is_taken_away_unless_it_was_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        let fails =
            || write(&path, |out| out.write_all(b"part").and(Err::<(), _>(io::Error::other("nothing to draw"))));
        assert!(fails().is_err() && !path.exists());
        assert!(try_to_create(&path).is_ok() && !path.exists());
        write(&path, |out| out.write_all(b"all")).expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "all");
        assert!(fails().is_err() && fs::read_to_string(&path).expect("there") == "all");
    }

    #[test]
    fn what_is_written_bit_by_bit_stays_if_it_is_ended() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        let begun = || {
            let mut file = Begun::new(&path).expect("made");
            file.write_all(b"all").expect("written");
            file
        };
        let unfinished = begun();
        // Whoever is killed now leaves nothing.
        assert!(unnamed_beside(&path).is_none() || fs::read_dir(folder.path()).expect("there").count() == 0);
        drop(unfinished);
        assert!(!path.exists());
        begun().end().expect("written");
        assert_eq!(fs::read_to_string(&path).expect("there"), "all");
        drop(begun());
        assert_eq!(fs::read_dir(folder.path()).expect("there").count(), 1);
    }

    #[test]
    fn a_fifo_that_nobody_reads_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        let refused = create(&path).expect_err("nobody reads").to_string();
        assert!(made.success() && refused.contains("nobody reads"), "{refused}");
    }
}
