//! The files of a commit, from pages of the Hub's tree, which can have anything in them.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::error::RemoteError;

/// The sizes of files, by name.
pub type Tree = BTreeMap<String, u64>;

/// More than any repository of a store that is of use.
const MOST: usize = 1_000_000;

/// Pages have a thousand entries.
pub const MOST_PAGES: usize = 10_000;

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
}

/// Adds the files of a page. Folders, and names that no store has, are left out.
pub fn add(tree: &mut Tree, page: &[u8], name: &str) -> Result<(), RemoteError> {
    let entries: Vec<Entry> = serde_json::from_slice(page)
        .map_err(|e| RemoteError::damaged(name, format!("the Hub's list can't be read: {e}")))?;
    for entry in entries {
        if entry.kind == "file" && is_plain(&entry.path) {
            tree.insert(entry.path, entry.size);
        }
        if tree.len() > MOST {
            let why = format!("it has more than {MOST} files");
            return Err(RemoteError::damaged(name, why));
        }
    }
    Ok(())
}

/// Returns whether a name stays inside its folder.
fn is_plain(name: &str) -> bool {
    let good = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    name.split('/').all(good)
}

/// Returns the next page, from the header `Link`.
pub fn next(link: &str) -> Option<&str> {
    link.split('<').skip(1).find_map(|one| {
        let (url, about) = one.split_once('>')?;
        let mut about = about.trim_end_matches([',', ' ']).split(';').map(str::trim);
        about
            .any(|it| it == "rel=\"next\"" || it == "rel=next")
            .then_some(url)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_adds_files_with_names_that_stay_inside() {
        let page = r#"[
            {"type":"directory","oid":"1","size":0,"path":"releases"},
            {"type":"file","oid":"2","size":7,"path":"releases/m/00000001.json"},
            {"type":"file","oid":"3","size":900,"path":"objects/3f/3f.zst","lfs":{"oid":"4","size":900}},
            {"type":"file","oid":"5","size":1,"path":"../etc/passwd"},
            {"type":"file","oid":"5","size":1,"path":"/etc/passwd"},
            {"type":"file","oid":"5","size":1,"path":"releases/./m/../00000002.json"},
            {"type":"file","oid":"5","size":1,"path":"releases\\m"},
            {"type":"link","oid":"5","size":1,"path":"link"}
        ]"#;
        let mut tree = Tree::new();
        add(&mut tree, page.as_bytes(), "releases").unwrap();
        let expected = [("objects/3f/3f.zst", 900), ("releases/m/00000001.json", 7)];
        let expected = expected.map(|(name, size)| (name.to_owned(), size));
        assert_eq!(tree.into_iter().collect::<Vec<_>>(), expected);
        for bad in ["{}", "[{}]", "[{\"type\":\"file\",\"path\":7}]", "x", ""] {
            assert!(
                add(&mut Tree::new(), bad.as_bytes(), "releases").is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_repository_of_more_files_than_any_is_refused() {
        let mut tree: Tree = (0..MOST).map(|n| (n.to_string(), 1)).collect();
        let page = |path: &str| format!("[{{\"type\":\"file\",\"size\":1,\"path\":\"{path}\"}}]");
        add(&mut tree, page("7").as_bytes(), "").unwrap();
        assert!(add(&mut tree, page("x").as_bytes(), "").is_err());
    }

    #[test]
    fn the_next_page_is_named_by_a_header() {
        for (link, expected) in [
            (
                "<https://hub/t?cursor=a,b>; rel=\"next\"",
                Some("https://hub/t?cursor=a,b"),
            ),
            (
                "<https://hub/t?cursor=a>; rel=\"next\"",
                Some("https://hub/t?cursor=a"),
            ),
            (
                "</first>; rel=\"first\", </t?c=2>; x=1; rel=next",
                Some("/t?c=2"),
            ),
            ("</first>; rel=\"first\"", None),
            ("", None),
            ("next", None),
        ] {
            assert_eq!(next(link), expected, "{link}");
        }
    }
}
