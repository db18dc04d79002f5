// SPDX-License-Identifier: MIT OR Apache-2.0
//! README and the pages in docs/: their commands are valid, and their links lead somewhere.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::{output_of, text};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// Commands that `whylate replay` shows a recording as.
const REPLAYED: [&str; 7] = ["wq", "timerlat", "irqsoff", "offcpu", "sqpoll", "block", "top"];
/// Characters that mark a form of the command line rather than a command: optional words, and words left out.
const FORM: [char; 3] = ['[', '…', '$'];

/// Paths and texts of README and all pages.
pub fn pages() -> Result<Vec<(PathBuf, String)>> {
    let root = Path::new(ROOT);
    let docs = fs::read_dir(root.join("docs"))?.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "md");
    let mut paths: Vec<PathBuf> = docs.into_iter().filter(is_page).chain([root.join("README.md")]).collect();
    paths.sort();
    paths.into_iter().map(|path| Ok((path.clone(), fs::read_to_string(path)?))).collect()
}

/// Splits a page into its code blocks and the text outside of them.
fn split(page: &str) -> (String, String) {
    let (mut code, mut prose, mut is_code) = (String::new(), String::new(), false);
    for line in page.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            continue;
        }
        let into = if is_code { &mut code } else { &mut prose };
        into.push_str(line);
        into.push('\n');
    }
    (code, prose)
}

/// Returns the words after `whylate` of a command, as a shell splits them: without a comment, a pipe or a redirection.
pub fn words(command: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in command.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '#' | '|' | '>' | ';') if word.is_none() => break,
            (None, ';') => break,
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Returns the words after `whylate` of each command in a page.
pub fn commands(page: &str) -> Vec<Vec<String>> {
    let (code, prose) = split(page);
    let code = code.replace("\\\n", " ");
    let in_code = code.lines().filter_map(|line| {
        let line = line.trim_start();
        let (prompt, command) = line.split_at(line.find("whylate ")?);
        let is_prompt = prompt.is_empty() || ["# ", "$ ", "| "].iter().any(|end| prompt.ends_with(end));
        // Some outputs begin with the program's name: a table's row, and rtla's message.
        let is_output = command.starts_with("whylate  ") || command.ends_with(" hit stop tracing");
        ((is_prompt || prompt.ends_with("sudo ")) && !is_output).then_some(command)
    });
    let spans = prose.split('`').skip(1).step_by(2);
    let in_prose = spans.filter_map(|span| span.strip_prefix("sudo ").unwrap_or(span).strip_prefix("whylate "));
    let in_code = in_code.filter_map(|command| command.strip_prefix("whylate "));
    in_code.chain(in_prose).map(|command| words(&command.replace("\\|", "|"))).collect()
}

/// Returns what is to be parsed for a command: itself without the command that it runs, and what a recording is shown as.
fn parts(mut words: Vec<String>) -> Vec<Vec<String>> {
    let end = words.iter().position(|word| word == "--");
    let is_replay = words.first().is_some_and(|word| word == "replay");
    let shown = words.iter().position(|word| REPLAYED.contains(&&**word)).filter(|_| is_replay);
    let rest = match (shown, end) {
        (Some(shown), _) => words.split_off(shown),
        (None, Some(end)) => words.split_off(end).split_off(1),
        (None, None) => Vec::new(),
    };
    if is_replay && !rest.is_empty() { vec![words, rest] } else { vec![words] }
}

#[test]
fn commands_in_docs_are_valid() -> Result<()> {
    let mut checked = BTreeSet::new();
    for (path, page) in pages()? {
        for command in commands(&page).into_iter().flat_map(parts) {
            // With --help at its end, a command is parsed and does nothing.
            let mut arguments: Vec<&str> = command.iter().map(|word| if word == "PID" { "1" } else { word }).collect();
            arguments.push("--help");
            let line = arguments.join(" ");
            if line.contains(FORM) || !checked.insert(line.clone()) {
                continue;
            }
            let output = output_of(&arguments)?;
            let said = text(&output.stderr);
            ensure!(output.status.success(), "{}: whylate {line}: {said}", path.display());
        }
    }
    ensure!(checked.len() > 100, "only {} commands", checked.len());
    Ok(())
}

/// Returns the anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let (_, prose) = split(page);
    let headings = prose.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | ' ');
    headings
        .map(|text| text.to_lowercase().chars().filter(|&c| kept(c)).collect::<String>().replace(' ', "-"))
        .collect()
}

#[test]
fn links_in_docs_lead_somewhere() -> Result<()> {
    let mut links = 0;
    for (path, page) in pages()? {
        let (_, prose) = split(&page);
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        for target in targets.filter(|target| !target.contains("://")) {
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let file = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            let at = || format!("{}: the link to {target}", path.display());
            ensure!(file.exists(), "{} leads nowhere", at());
            if let Some(anchor) = anchor {
                let page = fs::read_to_string(&file).with_context(at)?;
                ensure!(anchors(&page).contains(anchor), "{} leads to no heading", at());
            }
            links += 1;
        }
    }
    ensure!(links > 50, "only {links} links");
    Ok(())
}
