# Credentials come from the environment, never from a variable.
provider "google" {
  project = var.project
  region  = join("-", slice(split("-", var.zone), 0, 2))
  zone    = var.zone
}

module "cluster" {
  source = "../../modules/gcp"

  name             = var.name
  zone             = var.zone
  pools            = var.pools
  reservations     = var.reservations
  allow_unreserved = var.allow_unreserved
  transport        = var.transport
  network          = var.network
  nat              = var.nat
  ssh_keys         = var.ssh_keys
  allowed_clients  = var.allowed_clients
  admin_clients    = var.admin_clients
  image            = var.image
  ssh_user         = var.ssh_user
  disks            = var.disks
  protect          = var.protect
  prices           = var.prices
  project          = var.project
  network_profile  = var.network_profile
}
