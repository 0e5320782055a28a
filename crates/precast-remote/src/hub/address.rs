//! Where a repository of a Hub is, and whose token is sent: URLs, and the places that the Hub's own tools use.
//!
//! | from | meaning |
//! |---|---|
//! | `HF_TOKEN` | the token |
//! | `HF_TOKEN_PATH`, else `$HF_HOME/token`, else `~/.cache/huggingface/token` | the file that `hf auth login` writes |
//! | `HF_ENDPOINT` | another Hub than `https://huggingface.co` |

use std::path::{Path, PathBuf};

use url::Url;

use crate::host::is_local;

/// A revision of a repository.
#[derive(Debug, PartialEq, Eq)]
pub struct Address {
    /// The user or the organization.
    pub owner: String,
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// Looks up a variable of the environment.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Address {
    /// Reads `hf://OWNER/REPO` with `@REVISION` or without. An error is a fragment of a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("hf://").unwrap_or(text);
        let (path, revision) = path.split_once('@').unwrap_or((path, "main"));
        let parts: Vec<&str> = path.trim_end_matches('/').split('/').collect();
        let [owner, repo] = parts[..] else {
            return Err("it is not `hf://OWNER/REPO` or `hf://OWNER/REPO@REVISION`".to_owned());
        };
        for name in [owner, repo] {
            let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            let dots = name.starts_with('.') || name.ends_with('.') || name.contains("..");
            if name.is_empty() || name.len() > 96 || dots || !name.chars().all(good) {
                return Err(format!("`{name}` is no name on a Hub"));
            }
        }
        // The Hub's own tools write a `/` of a branch as `%2F` in such a URL.
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        let good = |c: char| c.is_ascii_alphanumeric() || "-_./+".contains(c);
        if !revision.chars().all(good)
            || (revision.split('/')).any(|part| part.is_empty() || part.starts_with('.'))
        {
            return Err(format!("`{revision}` is no branch, tag or commit"));
        }
        Ok(Self {
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            revision,
        })
    }
}

/// Returns the Hub that is meant. Plain HTTP is for a server of this machine.
pub fn endpoint(variables: Variables<'_>) -> Result<Url, String> {
    let text = variables("HF_ENDPOINT").filter(|text| !text.is_empty());
    let text = text.unwrap_or_else(|| "https://huggingface.co".to_owned());
    // What is in it may be a secret.
    let url = Url::parse(&text).map_err(|e| format!("HF_ENDPOINT is no URL: {e}"))?;
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
        return Err("HF_ENDPOINT has more than a host and a path".to_owned());
    }
    match url.scheme() {
        "https" => Ok(url),
        "http" if is_local(&text) => Ok(url),
        _ => Err("HF_ENDPOINT must be `https://`, or `http://` of this machine".to_owned()),
    }
}

/// Returns the token; none if the user has not logged in. `read` reads a file.
pub fn token(
    variables: Variables<'_>,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Result<Option<String>, String> {
    let variable = |name: &str| variables(name).filter(|value| !value.is_empty());
    let home = || Some(PathBuf::from(variable("HOME")?));
    let expanded = |path: String| match path.strip_prefix("~/") {
        Some(rest) => home().map_or_else(|| PathBuf::from(&path), |home| home.join(rest)),
        None => PathBuf::from(path),
    };
    let folder = || {
        let cache = || match variable("XDG_CACHE_HOME") {
            Some(cache) => Some(expanded(cache)),
            None => Some(home()?.join(".cache")),
        };
        match variable("HF_HOME") {
            Some(folder) => Some(expanded(folder)),
            None => Some(cache()?.join("huggingface")),
        }
    };
    let file = || match variable("HF_TOKEN_PATH") {
        Some(path) => Some(expanded(path)),
        None => Some(folder()?.join("token")),
    };
    let (found, place) = match variable("HF_TOKEN") {
        Some(token) => (Some(token), "HF_TOKEN".to_owned()),
        None => match file() {
            Some(file) => (read(&file), format!("`{}`", file.display())),
            None => (None, String::new()),
        },
    };
    let token = found.map(|token| token.trim().to_owned());
    let token = token.filter(|token| !token.is_empty());
    match token {
        Some(token) if !token.chars().all(|c| c.is_ascii_graphic()) => {
            Err(format!("{place} has no token: it has other characters"))
        }
        token => Ok(token),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_revision_of_a_repository() {
        for (text, revision) in [
            ("hf://org/my-model_1.5", "main"),
            ("hf://org/my-model_1.5/", "main"),
            ("hf://org/my-model_1.5@v1.0", "v1.0"),
            ("hf://org/my-model_1.5@refs/pr/3", "refs/pr/3"),
            ("hf://org/my-model_1.5@refs%2Fpr%2F3", "refs/pr/3"),
        ] {
            let expected = Address {
                owner: "org".to_owned(),
                repo: "my-model_1.5".to_owned(),
                revision: revision.to_owned(),
            };
            assert_eq!(Address::parse(text), Ok(expected), "{text}");
        }
        for text in [
            "hf://",
            "hf://org",
            "hf://org/",
            "hf:///model",
            "hf://datasets/org/model",
            "hf://org/model/folder",
            "hf://org/../model",
            "hf://../model",
            "hf://org/mo del",
            "hf://org/mo%20del",
            "hf://org/model@",
            "hf://org/model@a/../b",
            "hf://org/model@a b",
            "hf://org/model@a%20b",
            "hf://org/model@a//b",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }

    /// Returns the token with these variables, and the file that was read for it.
    fn found(variables: &[(&str, &str)]) -> (Result<Option<String>, String>, Option<PathBuf>) {
        let read = std::cell::RefCell::new(None);
        let variables = |name: &str| {
            let one = variables.iter().find(|(known, _)| *known == name);
            one.map(|(_, value)| (*value).to_owned())
        };
        let token = token(&variables, &|path| {
            *read.borrow_mut() = Some(path.to_owned());
            Some("of_a_file\n".to_owned())
        });
        (token, read.into_inner())
    }

    #[test]
    fn a_token_comes_from_the_places_of_the_hubs_own_tools() {
        let of_a_file = |path: &str| (Ok(Some("of_a_file".to_owned())), Some(path.into()));
        let home = ("HOME", "/home/me");
        let own = found(&[("HF_TOKEN", " secret\n"), ("HF_TOKEN_PATH", "/t"), home]);
        assert_eq!(own, (Ok(Some("secret".to_owned())), None));
        for (variables, path) in [
            (vec![home], "/home/me/.cache/huggingface/token"),
            (vec![home, ("XDG_CACHE_HOME", "/c")], "/c/huggingface/token"),
            (vec![home, ("HF_HOME", "~/hf")], "/home/me/hf/token"),
            (vec![home, ("HF_HOME", "/h"), ("HF_TOKEN_PATH", "/t")], "/t"),
            (vec![home, ("HF_TOKEN", ""), ("HF_HOME", "/h")], "/h/token"),
        ] {
            assert_eq!(found(&variables), of_a_file(path));
        }
        assert_eq!(found(&[]), (Ok(None), None));
        let (bad, _) = found(&[("HF_TOKEN", "secret\r\nHost: x")]);
        let why = bad.unwrap_err();
        assert!(why.starts_with("HF_TOKEN") && !why.contains("secret"));
    }

    #[test]
    fn another_hub_is_reached_by_https_or_on_this_machine() {
        let with = |value: &'static str| {
            endpoint(&move |name| (name == "HF_ENDPOINT").then(|| value.to_owned()))
        };
        assert_eq!(
            endpoint(&|_| None).unwrap().as_str(),
            "https://huggingface.co/"
        );
        for good in [
            "https://hub.example.org/x",
            "http://127.0.0.7:80",
            "http://[::1]:1",
        ] {
            assert!(with(good).is_ok(), "{good}");
        }
        for bad in [
            "http://hub.example.org",
            "http://localhost.example.org",
            "ftp://127.0.0.1",
            "hub.example.org",
            "https://me:secret@hub.example.org",
        ] {
            let why = with(bad).unwrap_err();
            assert!(
                why.contains("HF_ENDPOINT") && !why.contains("secret"),
                "{why}"
            );
        }
    }
}
