//! Credentials for a registry.

use std::{
    fs::File,
    io::{self, BufReader},
    path::PathBuf,
};

use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::secrets::RegistryAuth;

use super::refusal::shortened;
use crate::error::RemoteError;

/// Returns the credentials for a registry, from where `docker login` puts them: the file of docker, or the program that it
/// names for them.
pub fn credentials(host: &str) -> Result<RegistryAuth, RemoteError> {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker"));
    let folder = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let Some(folder) = folder.or_else(home) else {
        return Ok(RegistryAuth::Anonymous);
    };
    let path = folder.join("config.json");
    let denied = |why: &str| RemoteError::Denied {
        name: host.to_owned(),
        why: format!("{why} (`{}`)", path.display()),
    };
    let file = match File::open(&path) {
        Ok(file) => BufReader::new(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(RegistryAuth::Anonymous),
        Err(e) => return Err(denied(&e.to_string())),
    };
    // The name of Docker Hub in this file.
    let server = match host {
        "index.docker.io" => "https://index.docker.io/v1/",
        other => other,
    };
    match docker_credential::get_credential_from_reader(file, server) {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Ok(RegistryAuth::Basic(user, password))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(RegistryAuth::Bearer(token)),
        Err(CredentialRetrievalError::NoCredentialConfigured) => Ok(RegistryAuth::Anonymous),
        // What a helper says that has none for this registry.
        Err(CredentialRetrievalError::HelperFailure { stdout, .. })
            if stdout.contains("credentials not found") =>
        {
            Ok(RegistryAuth::Anonymous)
        }
        Err(error) => Err(denied(&shortened(&error.to_string()))),
    }
}
